"""The graph of one unit in a steady state, and the minimum period of orders in it; see `starts.modulo`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.fit.instance import B, F, FitInstance, Floats, I, W
from pipefit.schedule.fit.kernels import steady_state as modulo_kernel


class SteadyState(NamedTuple):
    """A steady state: unit u runs operation `kind` of stage s at offset_s[kind, s] + u * period_s."""

    period_s: float
    offset_s: Floats
    "[F, I, W; stage]: seconds, the earliest is 0. If I and W are merged, W starts at the end of B."
    merged: NDArray[np.bool_]
    "By stage: whether its backward runs as B."
    bound_s: float
    "Lower bound on the period of steady states with one unit per period."


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCycle:
    """An instance for the steady-state search: operations as nodes F, I, W of every stage, in units of `scale_s`."""

    time: Floats
    "[node], node = kind * stages + stage; a merged W takes no time and is not in any order."
    held: Floats
    peak: Floats
    "[node]: the memory that it needs above the level before it."
    edges: NDArray[np.int64]
    "[index, (source, target)]: first the data dependencies, then space for the orders."
    weight: Floats
    fixed: int
    "Number of edges that are data dependencies."
    lane: NDArray[np.int64]
    "[node]."
    limit: Floats
    present: NDArray[np.bool_]
    "[node]: false for a merged W."
    low: float
    "Lower bound on the period: the work of the busiest lane, and the memory limits."
    scale_s: float
    merged: NDArray[np.bool_]


Orders = tuple[NDArray[np.int64], NDArray[np.int64], float]
"""(nodes lane after lane in cyclic order, turn of every node, a bound on the period in the cycle's units)."""


def cycle_of(instance: FitInstance, merged: NDArray[np.bool_]) -> UnitCycle | None:
    """Return the graph of one unit, with times and memory averaged over units. None if a unit leaves memory
    allocated."""
    stages = instance.num_stages
    time, held, passing = (
        table.mean(axis=2) for table in (instance.time_s, instance.held_bytes, instance.passing_bytes)
    )
    time, held, passing = (
        np.stack([table[F], np.where(merged, table[B], table[I]), np.where(merged, 0.0, table[W])])
        for table in (time, held, passing)
    )
    left = np.abs(held.sum(axis=0))
    if (left > 1e-6 * np.abs(held).max(initial=0.0) + 1e-12).any():
        return None
    pairs, weight = [], []
    scale = float(instance.work_s().max()) / instance.num_units
    for stage in range(stages):
        pairs += [(stage, stages + stage), (stages + stage, 2 * stages + stage)]
        weight += [time[F, stage], time[I, stage]]
    ahead, back = instance.forward_s.mean(axis=1), instance.backward_s.mean(axis=1)
    for edge, (source, target) in enumerate(zip(instance.source.tolist(), instance.target.tolist(), strict=True)):
        pairs += [(source, target), (stages + target, stages + source)]
        weight += [time[F, source] + ahead[edge], time[I, target] + back[edge]]
    room = 3 * stages
    present = np.concatenate([np.ones(2 * stages, dtype=np.bool_), ~merged])
    lane = np.tile(instance.placement.astype(np.int64), 3)
    flat = time.ravel() / scale
    work = np.bincount(lane, weights=flat, minlength=instance.lanes)
    cycle = UnitCycle(
        time=flat,
        held=held.ravel(),
        peak=(np.maximum(held, 0.0) + passing).ravel(),
        edges=np.array(pairs + [(0, 0)] * room, dtype=np.int64),
        weight=np.array([*(w / scale for w in weight), *([0.0] * room)]),
        fixed=len(pairs),
        lane=lane,
        limit=instance.limit_bytes,
        present=present,
        low=float(work.max()),
        scale_s=scale,
        merged=merged,
    )
    return replace(cycle, low=max(cycle.low, _memory_period(cycle, stages)))


def _memory_period(cycle: UnitCycle, stages: int) -> float:
    """Return a lower bound on the period by Little's law: a unit's memory times its duration is at most limit * period.

    A stage holds at least the bytes allocated by F from F's start to I's end, and the remaining bytes until W's end.
    Both durations are longest paths, and the mean level over a period is at most its peak.
    """
    longest = longest_paths(cycle)
    low = 0.0
    for lane in range(len(cycle.limit)):
        area = 0.0
        for stage in np.flatnonzero(cycle.lane[:stages] == lane).tolist():
            f, i, w = stage, stages + stage, 2 * stages + stage
            until_i = longest[f, i] + cycle.time[i]
            remaining = cycle.held[f] + min(cycle.held[i], 0.0)
            area += cycle.held[f] * until_i if remaining < 0 else (cycle.held[f] - remaining) * until_i
            if remaining > 0:
                area += remaining * (until_i + cycle.time[w])
            if cycle.held[i] > 0:
                area += cycle.held[i] * (cycle.time[i] + cycle.time[w])
        if np.isfinite(cycle.limit[lane]) and cycle.limit[lane] > 0:
            low = max(low, area / float(cycle.limit[lane]))
    return low


def longest_paths(cycle: UnitCycle) -> Floats:
    """Return the longest path of data [node, node] from start to start, -inf without a path."""
    nodes = len(cycle.time)
    longest: Floats = np.full((nodes, nodes), -np.inf)
    np.fill_diagonal(longest, 0.0)
    for source, target, weight in zip(*cycle.edges[: cycle.fixed].T, cycle.weight, strict=False):
        longest[source, target] = max(longest[source, target], weight)
    for middle in range(nodes):
        longest = np.maximum(longest, longest[:, middle, None] + longest[None, middle])
    return longest


def period_state(cycle: UnitCycle, order: NDArray[np.int64], turn: NDArray[np.int64]) -> modulo_kernel.PeriodState:
    """Return the state of a search that begins with these orders, which it changes in place."""
    size = len(cycle.time)
    return modulo_kernel.PeriodState(
        order=order,
        first=np.searchsorted(cycle.lane[order], np.arange(len(cycle.limit) + 1)),
        turn=turn,
        time=cycle.time,
        held=cycle.held,
        peak=cycle.peak,
        limit=cycle.limit,
        edges=cycle.edges.copy(),
        weight=cycle.weight.copy(),
        turns=np.zeros(len(cycle.edges), dtype=np.int64),
        x=np.zeros(size),
        parent=np.zeros(size, dtype=np.int64),
        fixed=cycle.fixed,
        low=cycle.low,
        last=size // 3,
    )


def least_period_of(
    cycle: UnitCycle, order: NDArray[np.int64], turn: NDArray[np.int64], x: Floats | None = None
) -> float | None:
    """Return the minimum period of these orders, in the cycle's units. Fills `x` with the earliest starts.

    None if no period is feasible, or if the orders exceed the memory.
    """
    state = period_state(cycle, order, turn)
    if not modulo_kernel.fits_limits(state):
        return None
    period = modulo_kernel.least_period(state, modulo_kernel.write_edges(state))
    if x is not None:
        x[:] = state.x
    return float(period) if period > 0 else None


def steady_state_of(cycle: UnitCycle, order: NDArray[np.int64], turn: NDArray[np.int64], bound: float) -> SteadyState:
    """Return the steady state of these orders at their minimum period, with all operations as early as possible."""
    x = np.zeros(len(cycle.time))
    period = least_period_of(cycle, order, turn, x)
    assert period is not None, "orders without a period were kept"
    offset = (x - x.min()).reshape(3, -1) * cycle.scale_s
    return SteadyState(period * cycle.scale_s, offset, cycle.merged, bound * cycle.scale_s)
