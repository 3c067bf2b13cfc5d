"""The steady state by CP-SAT: feasibility of a given period, and a solution; see `starts.modulo`.

A lane's period begins with the forward of its first stage, so that none of its operations extends over the period's
end: operation o starts at base(lane) + r + k T with 0 <= r <= T - time. For a given T all this is linear, and one order
literal for each pair of a lane's operations gives the memory level at every start. A longer period is never harder (all
distances can be stretched), so bisection finds the minimum. A period proven infeasible with times rounded down is a
bound. Among the steady states of one period, the solver minimises the first stage's backward start.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.fit.exact.scale import common_quantum
from pipefit.schedule.fit.kernels.unit_cycle import Orders, UnitCycle, least_period_of

GRAINS = 400
"""Quanta in the busiest lane's work if no quantum divides all times."""
MEMORY_GRAINS = 100_000
WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedCycle:
    """A cycle in whole quanta, rounded down."""

    cycle: UnitCycle
    grain: float
    exact: bool
    time: NDArray[np.int64]
    weight: NDArray[np.int64]

    @staticmethod
    def from_cycle(cycle: UnitCycle) -> QuantisedCycle:
        times = np.concatenate([cycle.time, cycle.weight[: cycle.fixed]])
        grain, exact = common_quantum(times, cycle.low / GRAINS)
        down = [np.floor(durations / grain + 1e-6).astype(np.int64) for durations in (cycle.time, cycle.weight)]
        return QuantisedCycle(cycle=cycle, grain=grain, exact=exact, time=down[0], weight=down[1])


def shorten_period(cycle: UnitCycle, found: Orders | None, seconds: float, seed: int) -> Orders | None:
    """Return a steady state with a shorter period than `found`, or `found`, with the proven bound."""
    until = time.perf_counter() + seconds
    quantised = QuantisedCycle.from_cycle(cycle)
    low = int(np.ceil(cycle.low / quantised.grain - 1e-6))
    high = 8 * low if found is None else int(np.ceil(_lane_period(cycle, found) / quantised.grain - 1e-6))
    bound, best, target = cycle.low, found, low
    while target < high and time.perf_counter() < until - 0.05:
        status, orders = solve_period(quantised, target, (until - time.perf_counter()) / 2, seed)
        if orders is not None:
            high = target
            period = least_period_of(cycle, *orders)
            if period is not None and (best is None or period < _lane_period(cycle, best) * (1 - 1e-9)):
                best = (*orders, bound)
        elif status == "INFEASIBLE":
            bound = max(bound, target * quantised.grain)
            low = target + 1
        else:
            low = target + 1
        target = (low + high) // 2
    return None if best is None else (best[0], best[1], min(bound, _lane_period(cycle, best)))


def _lane_period(cycle: UnitCycle, orders: Orders) -> float:
    period = least_period_of(cycle, orders[0], orders[1])
    assert period is not None, "orders without a period were kept"
    return period


def solve_period(whole: QuantisedCycle, period: int, seconds: float, seed: int) -> tuple[str, Any]:
    """Return (status, (order, turn) or None) for a period of `period` quanta."""
    from ortools.sat.python import cp_model

    cycle, cp = whole.cycle, cp_model.CpModel()
    nodes = np.flatnonzero(cycle.present).tolist()
    if any(period < whole.time[node] for node in nodes):
        return "INFEASIBLE", None
    stages = len(cycle.time) // 3
    position, turn, start = _make_variables(whole, cp, nodes, period)
    for (source, target), weight in zip(cycle.edges[: cycle.fixed].tolist(), whole.weight.tolist(), strict=False):
        if target in start:
            cp.add(start[target] >= start[source] + weight)
    for lane in range(len(cycle.limit)):
        lane_nodes = [node for node in nodes if cycle.lane[node] == lane]
        spans = [cp.new_fixed_size_interval_var(position[node], int(whole.time[node]), "") for node in lane_nodes]
        cp.add_no_overlap(spans)
        if np.isfinite(cycle.limit[lane]):
            _limit_level(whole, cp, lane_nodes, position, turn, float(cycle.limit[lane]))
    cp.minimize(start[stages])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = WORKERS
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = seed
    status = str(solver.status_name(solver.solve(cp)))
    if status not in ("OPTIMAL", "FEASIBLE"):
        return status, None
    value = {node: (int(solver.value(position[node])), int(solver.value(start[node]))) for node in nodes}
    order = np.array(sorted(nodes, key=lambda node: (cycle.lane[node], *value[node], node)), dtype=np.int64)
    turns = np.zeros(len(cycle.time), dtype=np.int64)
    turns[nodes] = [int(solver.value(turn[node])) for node in nodes]
    return status, (order, turns)


def _make_variables(whole: QuantisedCycle, cp: Any, nodes: list[int], period: int) -> tuple[dict[int, Any], ...]:
    """Return (position in the lane's period, turn, start) of every node."""
    cycle = whole.cycle
    deep = 3 + int(cycle.weight.sum() / cycle.low)
    length = period * (deep + 1)
    base: dict[int, Any] = {}
    position: dict[int, Any] = {}
    turn: dict[int, Any] = {}
    start: dict[int, Any] = {}
    for node in nodes:
        lane = int(cycle.lane[node])
        is_first = lane not in base
        if is_first:
            base[lane] = cp.new_int_var(0, 0 if lane == cycle.lane[0] else length, "")
        position[node] = cp.new_int_var(0, 0 if is_first else period - int(whole.time[node]), "")
        turn[node] = cp.new_int_var(0, 0 if is_first else deep, "")
        start[node] = cp.new_int_var(0, length, "")
        cp.add(start[node] == base[lane] + position[node] + period * turn[node])
    return position, turn, start


def _limit_level(whole: QuantisedCycle, cp: Any, own: list[int], place: Any, turn: Any, limit: float) -> None:
    """Limit the level of a lane at the start of each of its operations, from turns and the order in the period."""
    cycle = whole.cycle
    scale = MEMORY_GRAINS / limit
    held, need = (np.rint(amounts * scale).astype(np.int64).tolist() for amounts in (cycle.held, cycle.most))
    before: dict[tuple[int, int], Any] = {}
    for k, left in enumerate(own):
        for right in own[k + 1 :]:
            literal = cp.new_bool_var("")
            cp.add(place[right] >= place[left] + int(whole.time[left])).only_enforce_if(literal)
            cp.add(place[left] >= place[right] + int(whole.time[right])).only_enforce_if(~literal)
            before[left, right], before[right, left] = literal, 1 - literal
    level = sum(-held[node] * turn[node] for node in own)
    for node in own:
        if need[node] > 0:
            earlier = sum(held[right] * before[right, node] for right in own if right != node)
            cp.add(level + earlier + need[node] <= MEMORY_GRAINS + 40 * len(own))
