"""The CP-SAT model of an instance, or of a window of it; nodes outside the window keep their order.

Every node (a forward, a backward, a W) is an interval; the intervals of a lane do not overlap; stages keep the order of
units; data needs its transfer time between nodes. Memory is a cumulative resource for each lane. An action that holds
`a` more bytes is a demand of `a` from its start until the stage's later actions for the unit free it at their ends, and
transient memory is a demand while the action runs. Memory is not counted outside the window: there the order, and with
it every level, is that of the original schedule. Ports and receive buffers are not modelled: transfers take their full
time and never wait, which bounds every schedule from below.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pipefit.schedule.fit.exact.lane_memory import limit_memory
from pipefit.schedule.fit.exact.scale import BACK, FORWARD, WEIGHT, NodeSchedule, ScaledInstance, WindowModel, state_of
from pipefit.schedule.fit.instance import B, I, W


def build_model(scaled: ScaledInstance, state: NodeSchedule, free: set[int], horizon: int) -> WindowModel:
    """Build the model in which the nodes in `free` may move, within their lane's range from the first of them to the
    last.

    All times are at most `horizon`.
    """
    from ortools.sat.python import cp_model

    model = WindowModel(scaled, state, free, horizon, cp_model.CpModel())
    ranges = [_movable_range(lane, free) for lane in state.lanes]
    _node_times(model, ranges)
    _add_dependencies(model)
    for lane, (first, last) in enumerate(ranges):
        _order_lane(model, lane, first, last)
        if first < last and scaled.limit[lane] >= 0:
            limit_memory(model, lane, first, last)
    _set_objective(model)
    return model


def _movable_range(lane: Sequence[int], free: set[int]) -> tuple[int, int]:
    """Return the range [first, last) of a lane's positions in which nodes may move."""
    positions = [position for position, node in enumerate(lane) if node in free]
    return (positions[0], positions[-1] + 1) if positions else (len(lane), len(lane))


def _node_times(model: WindowModel, ranges: Sequence[tuple[int, int]]) -> None:
    """Set start and end of every node: integers before the first movable node, variables for the rest."""
    scaled, cp, state = model.scaled, model.cp, model.state
    settled = _settled_nodes(scaled, state, ranges)
    for lane in state.lanes:
        for node in lane:
            kind, stage, unit = scaled.node_parts(node)
            merged = model.is_merged(stage, unit)
            duration = scaled.node_duration(kind, stage, unit, merged)
            if node in settled:
                model.start[node], model.end[node] = state.start[node], state.start[node] + duration
                continue
            begin = model.start[node] = cp.new_int_var(0, model.horizon, "")
            back = scaled.node_number(BACK, stage, unit)
            weight = scaled.node_number(WEIGHT, stage, unit)
            if kind == BACK and scaled.is_open[stage] and back in model.free and (merged or weight in model.free):
                _open_backward(model, stage, unit)
            elif kind != WEIGHT or (stage, unit) not in model.merge:
                model.intervals[node] = cp.new_fixed_size_interval_var(begin, duration, "")
                model.end[node] = begin + duration
    for (stage, unit), _ in model.merge.items():
        _open_weight(model, stage, unit)


def _open_backward(model: WindowModel, stage: int, unit: int) -> None:
    """Add a backward whose length depends on whether W is merged into it."""
    scaled, cp = model.scaled, model.cp
    node = scaled.node_number(BACK, stage, unit)
    merge = model.merge[stage, unit] = cp.new_bool_var("")
    alone, both = int(scaled.time[I, stage, unit]), int(scaled.time[B, stage, unit])
    size = alone + (both - alone) * merge
    end = model.end[node] = cp.new_int_var(0, model.horizon, "")
    model.intervals[node] = cp.new_interval_var(model.start[node], size, end, "")


def _open_weight(model: WindowModel, stage: int, unit: int) -> None:
    """Add a W that exists unless it is merged; if merged, it starts and ends at the end of the backward."""
    scaled, cp = model.scaled, model.cp
    node, merge = scaled.node_number(WEIGHT, stage, unit), model.merge[stage, unit]
    begin = model.start.setdefault(node, cp.new_int_var(0, model.horizon, ""))
    end = model.end[node] = cp.new_int_var(0, model.horizon, "")
    duration = int(scaled.time[W, stage, unit])
    back = model.end[scaled.node_number(BACK, stage, unit)]
    model.intervals[node] = cp.new_optional_interval_var(begin, duration, end, ~merge, "")
    cp.add(begin >= back)
    cp.add(begin == back).only_enforce_if(merge)
    cp.add(end == back).only_enforce_if(merge)


def _settled_nodes(scaled: ScaledInstance, state: NodeSchedule, ranges: Sequence[tuple[int, int]]) -> set[int]:
    """Return the nodes whose start does not depend on the window."""
    settled: set[int] = set()
    cursor, moved = [0] * len(state.lanes), True
    while moved:
        moved = False
        for lane_number, lane in enumerate(state.lanes):
            while cursor[lane_number] < ranges[lane_number][0]:
                node = lane[cursor[lane_number]]
                if any(earlier not in settled for earlier, _ in scaled.data_predecessors(*scaled.node_parts(node))):
                    break
                settled.add(node)
                cursor[lane_number] += 1
                moved = True
    return settled


def _add_dependencies(model: WindowModel) -> None:
    """Require that data arrives before it is used, and that every stage keeps the order of units."""
    scaled, cp = model.scaled, model.cp
    for node, begin in model.start.items():
        kind, stage, unit = scaled.node_parts(node)
        if isinstance(begin, int):
            continue
        for earlier, distance in scaled.data_predecessors(kind, stage, unit):
            cp.add(begin >= model.end[earlier] + distance)
        rank = unit if kind == FORWARD else int(scaled.position[unit])
        if rank == 0 or (kind == WEIGHT and scaled.is_open[stage]):
            continue
        previous = rank - 1 if kind == FORWARD else int(scaled.instance.backwards[rank - 1])
        before = scaled.node_number(kind, stage, previous)
        if before in model.end:
            cp.add(begin >= model.end[before])


def _order_lane(model: WindowModel, lane: int, first: int, last: int) -> None:
    """Run one node at a time: fixed nodes keep their order, and the window stays between its neighbours."""
    cp, nodes = model.cp, model.state.lanes[lane]
    for left, right in pairwise(nodes):
        inside = left in model.free or right in model.free
        if not inside and not isinstance(model.start[right], int):
            cp.add(model.start[right] >= model.end[left])
    window = nodes[first:last]
    extra = [
        model.scaled.node_number(WEIGHT, stage, unit)
        for stage, unit in model.merge
        if model.scaled.instance.placement[stage] == lane
    ]
    movable = list(dict.fromkeys([*window, *extra]))
    if len(window) > 1:
        cp.add_no_overlap([model.intervals[node] for node in movable if node in model.intervals])
    fixed = [node for node in window if node not in model.free]
    for left, right in pairwise(fixed):
        if not isinstance(model.start[right], int):
            cp.add(model.start[right] >= model.end[left])
    if first and window:
        for node in movable:
            cp.add(model.start[node] >= model.end[nodes[first - 1]])
    if last < len(nodes) and window:
        for node in movable:
            cp.add(model.start[nodes[last]] >= model.end[node])


def _set_objective(model: WindowModel) -> None:
    """Make the span at least the distance from the first start on a lane, or from 0, to the last end."""
    scaled, cp, instance = model.scaled, model.cp, model.scaled.instance
    model.span = cp.new_int_var(0, model.horizon, "span")
    sources = [stage for stage in range(instance.num_stages) if stage not in instance.target]
    if len(sources) == 1 and not isinstance(model.start[scaled.node_number(FORWARD, sources[0], 0)], int):
        cp.add(model.start[scaled.node_number(FORWARD, sources[0], 0)] == 0)
    final = int(instance.backwards[-1])
    for lane in model.state.lanes:
        stages = sorted({scaled.node_parts(node)[1] for node in lane})
        ends = [model.end[lane[-1]]]
        for stage in stages:
            last = [scaled.node_number(kind, stage, final) for kind in (BACK, WEIGHT)]
            if scaled.is_open[stage]:  # its W's may come in any order
                last += [scaled.node_number(WEIGHT, stage, unit) for unit in range(instance.num_units) if unit != final]
            ends += [model.end[node] for node in last if node in model.end]
        begins: list[Any] = [0]
        if instance.objective == "span":
            begins = [model.start[scaled.node_number(FORWARD, stage, 0)] for stage in stages]
        for end in ends:
            for begin in begins:
                cp.add(model.span >= end - begin)


def read_starts(model: WindowModel, solver: Any) -> dict[int, int]:
    """Return node -> start in the solver's solution."""
    return {
        node: begin if isinstance(begin, int) else int(solver.value(begin)) for node, begin in model.start.items()
    } | {-1 - k: int(solver.value(literal)) for k, literal in enumerate(model.merge.values())}


def orders_from_starts(model: WindowModel, start: dict[int, int]) -> NodeSchedule | None:
    """Return the schedule with the orders of these starts, every node as early as possible."""
    scaled = model.scaled
    merged = model.state.merged.copy()
    for k, (stage, unit) in enumerate(model.merge):
        merged[stage, unit] = bool(start[-1 - k])
    lanes: list[list[tuple[int, int, int]]] = [[] for _ in model.state.lanes]
    for node, begin in start.items():
        if node < 0:
            continue
        kind, stage, unit = scaled.node_parts(node)
        if kind != WEIGHT or not merged[stage, unit]:
            end = begin + scaled.node_duration(kind, stage, unit, bool(merged[stage, unit]))
            lanes[int(scaled.instance.placement[stage])].append((begin, end, node))
    return state_of(scaled, [[node for _, _, node in sorted(lane)] for lane in lanes], merged)
