"""All schedules of a tiny instance, one after the other: what bounds and solvers are held against.

It shares no code with either: orders are enumerated lane by lane, and a plain simulation starts every operation as soon
as its lane and its data allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from pipefit.schedule.fit.instance import B, F, FitInstance, I, W

Op = tuple[int, int, int]
"""(kind, stage, unit)."""


def lane_orders(instance: FitInstance, lane: int) -> Iterator[tuple[Op, ...]]:
    """Every order of a lane in which stages keep the order of units and memory suffices, each unit split or merged."""
    stages = instance.lane_stages(lane)
    choices = []
    for stage in stages:
        kinds = [True] * bool(instance.may_merge[stage]) + [False] * bool(instance.may_split[stage])
        choices += [kinds] * instance.num_units
    for merged in itertools.product(*choices):
        is_merged = {
            (stage, unit): merged[k * instance.num_units + unit]
            for k, stage in enumerate(stages)
            for unit in range(instance.num_units)
        }
        yield from _extend(instance, stages, is_merged, [], 0.0, lane)


def _extend(
    instance: FitInstance,
    stages: Sequence[int],
    merged: dict[tuple[int, int], bool],
    done: list[Op],
    level: float,
    lane: int,
) -> Iterator[tuple[Op, ...]]:
    ready: list[Op] = []
    back = instance.backwards.tolist()
    for stage in stages:
        forwards = [op for op in done if op[:2] == (F, stage)]
        ways = [op for op in done if op[0] in (I, B) and op[1] == stage]
        weights = [op for op in done if op[:2] == (W, stage)]
        if len(forwards) < instance.num_units:
            ready.append((F, stage, len(forwards)))
        if len(ways) < instance.num_units:
            unit = back[len(ways)]
            if (F, stage, unit) in done:
                ready.append((B if merged[stage, unit] else I, stage, unit))
        split = [unit for unit in back if not merged[stage, unit]]
        if len(weights) < len(split) and (I, stage, split[len(weights)]) in done:
            ready.append((W, stage, split[len(weights)]))
    if not ready:
        yield tuple(done)
    for op in ready:
        change = instance.held_bytes[op]
        if level + max(change, 0.0) + instance.passing_bytes[op] <= instance.limit_bytes[lane] * (1 + 1e-9):
            yield from _extend(instance, stages, merged, [*done, op], level + change, lane)


def run(instance: FitInstance, lanes: Sequence[Sequence[Op]]) -> tuple[float, float] | None:
    """(makespan, longest span of a lane) of these orders, or None if they wait for each other for ever."""
    end: dict[Op, float] = {}
    free, begun = [0.0] * len(lanes), [None] * len(lanes)
    left = [list(lane) for lane in lanes]
    moved = True
    while moved:
        moved = False
        for lane, ops in enumerate(left):
            while ops:
                arrivals = _arrivals(instance, ops[0], end)
                if None in arrivals:
                    break
                op = ops.pop(0)
                start = max([free[lane], *arrivals])
                begun[lane] = start if begun[lane] is None else begun[lane]
                end[op] = free[lane] = start + float(instance.time_s[op])
                moved = True
    if any(left):
        return None
    return max(free), max(stop - first for stop, first in zip(free, begun, strict=True))


def _arrivals(instance: FitInstance, op: Op, end: dict[Op, float]) -> list[float | None]:
    kind, stage, unit = op
    if kind == F:
        edges = np.flatnonzero(instance.target == stage).tolist()
        made = [(end.get((F, int(instance.source[e]), unit)), instance.forward_s[e, unit]) for e in edges]
    elif kind == W:
        made = [(end.get((I, stage, unit)), 0.0)]
    else:
        edges = np.flatnonzero(instance.source == stage).tolist()
        made = [(end.get((F, stage, unit)), 0.0)]
        for e in edges:
            target = int(instance.target[e])
            done = end.get((I, target, unit), end.get((B, target, unit)))
            made.append((done, instance.backward_s[e, unit]))
    return [None if stop is None else stop + float(way) for stop, way in made]


def best(instance: FitInstance) -> float:
    """The least objective over all schedules; inf if there is none."""
    orders = [list(lane_orders(instance, lane)) for lane in range(instance.lanes)]
    found = np.inf
    for lanes in itertools.product(*orders):
        times = run(instance, lanes)
        if times is not None:
            found = min(found, times[0] if instance.objective == "makespan" else times[1])
    return float(found)
