"""Repeated blocks with tuned real offsets: one offset for each F, I and W of a stage, and one period.

The wishes of a block do not depend on the number of microbatches, so a few numbers define thousands of operations.
`kernels.greedy.construct` builds the orders of a block, with its ends and within memory, in microseconds per operation.
A random search tunes the offsets.
"""

from __future__ import annotations

import math
import time

import numpy as np

from pipefit.schedule.fit.instance import FitInstance, Floats, I, W
from pipefit.schedule.fit.kernels.arrays import SearchLoops
from pipefit.schedule.fit.kernels.sweep import InstanceTables
from pipefit.schedule.fit.move_budget import MoveBudget
from pipefit.schedule.fit.starts.construct import OrderBuilder, merged_stages, sweep_orders
from pipefit.schedule.fit.starts.modulo import find_steady_state
from pipefit.schedule.fit.starts.start import TimedOrders

COST = 30
"""Number of moves that one construction counts as."""
MOST = 1500
"""Maximum number of blocks tried from one start."""


MOST_STEADY, LEAST_STEADY = 3000, 100
STEADY_COST = 60
"""Moves of the local search that one move of the steady-state search counts as, with 16 stages."""
STEADY_S = 2.5e-4
"""Approximate seconds of one such move."""


def steady_starts(
    instance: FitInstance, t: InstanceTables, loops: SearchLoops, budget: MoveBudget, seed: int
) -> list[TimedOrders]:
    """Return the orders built from the shortest steady state found, if there is one."""
    size = (16 / instance.num_stages) ** 2
    moves = int(min(MOST_STEADY, (budget.moves - budget.spent) / STEADY_COST) * size)
    if budget.until_s < math.inf:
        left = max(budget.until_s - time.perf_counter(), 0.0)
        moves = min(moves, int(0.15 * left / STEADY_S * size))
    if moves < LEAST_STEADY:
        return []
    steady = find_steady_state(instance, moves=moves, seed=seed)
    if steady is None:
        return []
    builder = OrderBuilder(instance, t, loops, steady.merged)
    time_s = builder.repeated_objective(steady.offset_s, steady.period_s)
    return [builder.valued_start(time_s, "steady state")] if time_s < math.inf else []


def tune_offsets(
    instance: FitInstance, t: InstanceTables, loops: SearchLoops, start: TimedOrders, budget: MoveBudget, seed: int
) -> TimedOrders | None:
    """Return the best orders built from blocks near the steady state of `start`."""
    offset, period = middle_period(instance, t, loops, start)
    builder = OrderBuilder(instance, t, loops, merged_stages(instance, start.orders))
    random = np.random.default_rng(seed)
    step = float(instance.time_s[:3].mean())
    name = f"{start.name}, tuned"
    time_s = builder.repeated_objective(offset, period)
    best = builder.valued_start(time_s, name) if time_s < math.inf else None
    tries = min(MOST, budget.moves // COST)
    for n in range(tries):
        if not budget.take_moves(COST):
            break
        budget.spent += COST
        near, stretch = change_offsets(random, offset, step * (1.0 - n / tries) + 0.05 * step)
        time_s = builder.repeated_objective(near, period * stretch)
        if time_s < math.inf and (best is None or time_s <= best.time_s):
            best, offset, period = builder.valued_start(time_s, name), near, period * stretch
    return best


def middle_period(
    instance: FitInstance, t: InstanceTables, loops: SearchLoops, start: TimedOrders
) -> tuple[Floats, float]:
    """Return ([kind, stage] offsets, period) of the middle of a schedule."""
    begin = sweep_orders(instance, t, loops, start.orders).begin.reshape(3, instance.num_stages, instance.num_units)
    begin = np.stack([begin[0], begin[I], np.where(begin[W] < 1e299, begin[W], begin[I] + instance.time_s[I])])
    begin[I:] = begin[I:][:, :, instance.backwards]
    middle, reach = instance.num_units // 2, max(1, min(6, instance.num_units // 4))
    low, high = middle - reach, min(middle + reach, instance.num_units - 1)
    period = float((begin[:, :, high] - begin[:, :, low]).mean()) / max(high - low, 1)
    n = np.arange(low, high + 1)
    offset: Floats = np.median(begin[:, :, low : high + 1] - period * n, axis=2)
    return offset, period


def change_offsets(random: np.random.Generator, offset: Floats, step: float) -> tuple[Floats, float]:
    """Return changed offsets, and a factor for the period.

    One offset moves, or the offsets of one kind on a run of stages move equally or increasingly, or the period changes.
    """
    kinds, stages = offset.shape
    which, by = int(random.integers(16)), step * int(random.integers(-1000, 1001)) / 500.0
    kind, first = int(random.integers(kinds)), int(random.integers(stages))
    last = int(random.integers(first, stages)) + 1
    near = offset.copy()
    if which == 0:
        return near, 1.0 + 0.02 * int(random.integers(-1000, 1001)) / 1000.0
    if which < 8:
        near[kind, first] += by
    elif which < 12:
        near[kind, first:last] += by
    else:
        near[kind, first:last] += by * (np.arange(last - first) + 1) / 4.0
    return near, 1.0
