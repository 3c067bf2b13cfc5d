"""Local search on orders by simulated annealing with small random moves (`kernels.moves.anneal`).

The starts race: in every round each gets some moves, and the better half continues with twice the number. After the
last one has had its moves, the next generation begins with other random numbers and twice the moves. In each run the
heat, the accepted cost of a move, falls from a tenth of a mean operation to almost zero, so that a search that is
stopped early has cooled down, too.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.portable import portable_power
from pipefit.schedule.fit.fit_budget import FIT_BUDGET
from pipefit.schedule.fit.instance import B, FitInstance, I, W
from pipefit.schedule.fit.kernels.arrays import SearchLoops, make_state, make_trial
from pipefit.schedule.fit.kernels.sweep import InstanceTables
from pipefit.schedule.fit.move_budget import MoveBudget
from pipefit.schedule.fit.starts.construct import fits_in_memory, sweep_orders
from pipefit.schedule.fit.starts.start import TimedOrders


def improve_orders(
    instance: FitInstance,
    t: InstanceTables,
    loops: SearchLoops,
    starts: list[TimedOrders],
    budget: MoveBudget,
    seed: int,
    goal_s: float = 0.0,
) -> TimedOrders:
    """Return the best orders found from `starts`, which are sorted by time. Stops as soon as the goal is reached."""
    best = starts[0]
    racers, first = _race_sizes(budget.moves - budget.spent)
    generation = 0
    while budget.take_moves(1) and best.time_s > goal_s:
        length = first << generation
        draws, hotter = seed + 1000 * generation, min(1.0 + generation, FIT_BUDGET.most_heat_factor)
        pool = starts[:racers]
        while len(pool) > 1 and budget.take_moves(1):
            pool = [
                anneal_orders(instance, t, loops, racer, budget, draws + n, length, hotter)
                for n, racer in enumerate(pool)
            ]
            pool = sorted(pool, key=lambda start: start.time_s)[: len(pool) // 2]
            length *= 2
        for racer in sorted((*pool, best), key=lambda start: start.time_s)[: 1 + (generation > 0)]:
            annealed = anneal_orders(instance, t, loops, racer, budget, draws + 500, 2 * length, hotter)
            best = min(best, annealed, key=lambda start: start.time_s)
        generation += 1
    return best


def _race_sizes(moves: int) -> tuple[int, int]:
    """Return (racers, moves of each in the first round) of a first generation that ends within `moves` moves."""
    racers = max(1, min(FIT_BUDGET.racers, moves // FIT_BUDGET.least_racer_moves))
    return racers, max(1, min(FIT_BUDGET.first_round_moves, int(moves / (racers * (2 + math.log2(racers))))))


def anneal_orders(
    instance: FitInstance,
    t: InstanceTables,
    loops: SearchLoops,
    start: TimedOrders,
    budget: MoveBudget,
    seed: int,
    moves: int | None = None,
    hotter: float = 1.0,
) -> TimedOrders:
    """Anneal a start with `moves` moves (default: all of the budget).

    The heat falls once, from `hotter` times the initial heat of short runs.
    """
    moves = budget.moves - budget.spent if moves is None else moves
    if not budget.take_moves(moves):
        return start
    s = sweep_orders(instance, t, loops, start.orders)
    r = make_trial(t, s, seed)
    best, size = s.order.copy(), s.length.copy()
    mean = float(t.time[np.concatenate(start.orders)].mean())
    value = s.value[0] + FIT_BUDGET.ends_weight * s.value[1]
    free = toggle_percent(instance)
    shifts = np.cumsum((FIT_BUDGET.shift_percent, FIT_BUDGET.run_shift_percent)) + free
    settings = np.array(
        [FIT_BUDGET.ends_weight, value, free, *shifts, FIT_BUDGET.longest_shift, FIT_BUDGET.critical_percent]
    )
    hot, cold = FIT_BUDGET.first_heat_operations * hotter, FIT_BUDGET.last_heat_operations
    heats = np.array([hot * mean, cold * mean, portable_power(cold / hot, 1.0 / moves)])
    while moves > 0:
        now = budget.take_moves(min(moves, FIT_BUDGET.clock_moves))
        if not now:
            break
        loops.anneal(t, s, r, best, size, heats, settings, now)
        budget.spent += now
        moves -= now
    s = sweep_orders(instance, t, loops, [best[lane, : size[lane]].astype(np.int32) for lane in range(instance.lanes)])
    if float(s.value[0]) > start.time_s:
        return start
    return TimedOrders(
        float(s.value[0]), start.name, [s.order[k, : s.length[k]].astype(np.int32) for k in range(len(size))]
    )


def merge_neighbours(instance: FitInstance, t: InstanceTables, loops: SearchLoops, start: TimedOrders) -> TimedOrders:
    """Merge every I directly followed by its own W into a B, if B takes no longer and the objective does not grow."""
    size = instance.num_stages * instance.num_units
    quicker = instance.time_s[B] <= (instance.time_s[I] + instance.time_s[W]) * (1 + 1e-12)
    may = np.zeros(4 * size, dtype=np.bool_)
    may[I * size : W * size] = (quicker & instance.may_merge[:, None]).reshape(-1)
    pairs = [(may[order[:-1]] & (order[1:] == order[:-1] + size)).nonzero()[0] for order in start.orders]
    count = sum(map(len, pairs))
    if not count:
        return start
    everything = _merge_pairs(instance, t, loops, start, pairs)
    if everything is not None:
        return everything
    for lane, positions in enumerate(pairs):
        for position in positions[::-1] if count > 1 else ():
            alone = [positions[:0]] * len(pairs)
            alone[lane] = np.array([position])
            start = _merge_pairs(instance, t, loops, start, alone) or start
    return start


def _merge_pairs(
    instance: FitInstance, t: InstanceTables, loops: SearchLoops, start: TimedOrders, pairs: list[NDArray[np.intp]]
) -> TimedOrders | None:
    """Return the orders with the operations at these positions of every lane merged with the next ones, or None if
    slower."""
    orders = list(start.orders)
    for lane, positions in enumerate(pairs):
        if len(positions):
            order = orders[lane].copy()
            order[positions] += (B - I) * instance.num_stages * instance.num_units
            orders[lane] = np.delete(order, positions + 1)
    s = make_state(t, instance, orders)
    if loops.sweep(t, s) and s.value[0] <= start.time_s and fits_in_memory(t, s, orders):
        return TimedOrders(float(s.value[0]), start.name, orders)
    return None


def toggle_percent(instance: FitInstance) -> int:
    """Return the percentage of moves that switch between B and I with W: 0 if B saves neither time nor memory."""
    return FIT_BUDGET.toggle_percent if instance.open_stages().any() else 0
