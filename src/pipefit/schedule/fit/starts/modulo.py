"""The steady state of a schedule as a modulo schedule: every lane repeats one microbatch's operations with a real
period.

One microbatch's operations get real offsets; every other microbatch does the same a whole number of periods later. A
building block (`schedule.blocks.building_block`) is the special case of whole slots; with real times it loses the
rounding to slots in every period. Here the period is the exact minimum for the orders. The method is annealing over
orders (`kernels.steady_state`).

The period is that of one unit, with each stage's mean times over units. A pattern that repeats only every second unit
can be quicker, so `bound_s` bounds steady states of this kind, not all schedules.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.fit.instance import B, FitInstance, Floats, I, W
from pipefit.schedule.fit.kernels import steady_state as modulo_kernel
from pipefit.schedule.fit.kernels.unit_cycle import (
    Orders,
    SteadyState,
    UnitCycle,
    cycle_of,
    period_state,
    steady_state_of,
)
from pipefit.schedule.taskgraph.kernel import compile_modules

STARTS = 12
STRETCHES = (1.0, 1.1, 1.3, 1.0, 1.6, 1e9)
"""Initial periods of annealing, in multiples of the minimum; the last one runs one microbatch at a time."""
HEAT = 0.1
"""Accepted cost of a move at the beginning, in periods."""


def find_steady_state(instance: FitInstance, *, moves: int = 6000, seed: int = 0) -> SteadyState | None:
    """Return the shortest steady state found, or None if none fits in the limits.

    `moves` are tried by annealing from each of several starts. If B is quicker than I and W, both are tried.
    """
    states: list[SteadyState] = []
    for merged in _merge_options(instance):
        cycle = cycle_of(instance, merged)
        if cycle is None:
            continue
        best = _anneal_cycle(cycle, moves, np.random.default_rng(seed))
        if best is not None:
            states.append(steady_state_of(cycle, *best))
    return min(states, key=lambda state: (state.period_s, float(state.offset_s.max())), default=None)


def _merge_options(instance: FitInstance) -> list[NDArray[np.bool_]]:
    """Return choices, by stage, of merging I and W: only on stages that cannot split, and on all stages on which B is
    quicker."""
    apart = instance.time_s[I].mean(axis=1) + instance.time_s[W].mean(axis=1)
    quicker = instance.may_merge & (instance.time_s[B].mean(axis=1) < apart * (1 - 1e-9))
    choices = [~instance.may_split]
    if (quicker & instance.may_split).any():
        choices.append(~instance.may_split | quicker)
    return choices


def _anneal_cycle(cycle: UnitCycle, moves: int, random: np.random.Generator) -> Orders | None:
    """Return the best of several annealings.

    Their initial orders are those of an unlimited number of devices with slowed-down hops.
    """
    run = compile_modules((modulo_kernel,), ("anneal",), allocates=True)["anneal"]
    best: Orders | None = None
    best_cost = np.inf
    for attempt in range(STARTS):
        slower = random.uniform(1.0, 2.6, 4) if attempt % 2 else np.ones(4)
        stretch = STRETCHES[attempt // 2 % len(STRETCHES)]
        order, turn = _orders_of_starts(cycle, _slowed_starts(cycle, slower), cycle.low * stretch)
        best_orders = np.zeros_like(order), np.zeros_like(turn)
        cost = run(period_state(cycle, order, turn), random.random((moves, 4)), HEAT, *best_orders)
        if 0 <= cost < best_cost:
            best_cost, best = cost, (*best_orders, cycle.low)
    return best


def _slowed_starts(cycle: UnitCycle, slower: Floats) -> Floats:
    """Return the earliest starts [node] with hops slowed down by `slower`: forwards and backwards, on a lane's even and
    odd stages."""
    stages = len(cycle.time) // 3
    seen: dict[int, int] = {}
    leg = np.zeros(stages, dtype=np.int64)
    for stage in range(stages):
        leg[stage] = seen.get(int(cycle.lane[stage]), 0) % 2
        seen[int(cycle.lane[stage])] = leg[stage] + 1
    source, target = cycle.edges[: cycle.fixed].T
    hops = source // stages == target // stages
    factor = np.where(hops, slower[2 * (source // stages % 2) + leg[source % stages]], 1.0)
    weight = cycle.weight[: cycle.fixed] * factor
    x: Floats = np.zeros(len(cycle.time))
    for _ in range(2 * stages):
        np.maximum.at(x, target, x[source] + weight)
    return x


def _orders_of_starts(cycle: UnitCycle, x: Floats, period: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (order, turn) of all nodes, lane after lane, sorted by their position in the period."""
    turn = np.floor(x / period).astype(np.int64)
    order = np.lexsort((x, x - turn * period, cycle.lane))
    return order[cycle.present[order]], turn
