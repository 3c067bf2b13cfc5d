"""The memory of a lane in the CP-SAT model: a cumulative resource over the part of the lane in which nodes may move.

An action allocates at its start and frees at its end, as in the simulator. The memory of a unit on a stage is therefore
a sum of demands, each from the start of the allocating action to the end of the freeing one, last in, first out.
Transient memory is a demand while the action runs. Memory allocated before the window counts from time 0, and memory
freed after it until the horizon: at both ends the levels are those of a schedule that fits.
"""

from __future__ import annotations

from typing import Any

from pipefit.schedule.fit.exact.scale import BACK, FORWARD, WEIGHT, WindowModel
from pipefit.schedule.fit.instance import B, F, I, W

Demand = tuple[Any, Any, int, Any]
"""(from, until, amount, literal that enables it or None)."""


def limit_memory(model: WindowModel, lane: int, first: int, last: int) -> None:
    """Keep a lane within its limit while its nodes [first, last) run."""
    scaled, nodes = model.scaled, model.state.lanes[lane]
    window = set(nodes[first:last])
    units = dict.fromkeys(scaled.node_parts(node)[1:] for node in nodes[first:last])
    level = sum(_net_change(model, node) for node in nodes[:first] if scaled.node_parts(node)[1:] not in units)
    relation = dict.fromkeys(nodes[:first], -1) | dict.fromkeys(nodes[last:], 1) | dict.fromkeys(window, 0)
    demands: list[Demand] = []
    for stage, unit in units:
        level += _add_lasting(model, stage, unit, relation, demands)
        _add_passing(model, stage, unit, window, demands)
    _add_cumulative(model, demands, int(scaled.limit[lane]) - level)


def _net_change(model: WindowModel, node: int) -> int:
    """Return the bytes that an action leaves allocated (negative: frees) in the schedule of which the window is a
    part."""
    kind, stage, unit = model.scaled.node_parts(node)
    code = F if kind == FORWARD else W if kind == WEIGHT else B if model.is_merged(stage, unit) else I
    return int(model.scaled.held[code, stage, unit])


def _action_changes(model: WindowModel, stage: int, unit: int) -> list[int]:
    """Return the bytes that F, the backward and W leave allocated. If merging is open, W frees the bytes of B, if
    more."""
    held = [int(amount) for amount in model.scaled.held[:, stage, unit]]
    if (stage, unit) in model.merge:
        return [held[F], held[I], min(held[W], held[B] - held[I])]
    return [held[F], held[B]] if model.is_merged(stage, unit) else [held[F], held[I], held[W]]


def _add_lasting(model: WindowModel, stage: int, unit: int, place: dict[int, int], demands: list[Demand]) -> int:
    """Append the demands of the memory held by a unit on a stage, and return the amount to add to the level."""
    scaled, level = model.scaled, 0
    stack: list[tuple[Any, int, Any]] = []
    steps = _action_changes(model, stage, unit)
    for kind, step in zip((FORWARD, BACK, WEIGHT), steps, strict=False):
        node = scaled.node_number(kind, stage, unit)
        where = place.get(node, 0)
        begin = model.start[node] if where == 0 else 0 if where < 0 else model.horizon
        end = model.end[node] if where == 0 else begin
        if step > 0:
            stack.append((begin, step, model.is_parted(stage, unit) if kind == BACK else None))
        while step < 0 and stack:
            origin, amount, literal = stack.pop()
            freed = min(amount, -step)
            step += freed
            if amount > freed:
                stack.append((origin, amount - freed, literal))
            demands.append((origin, end, freed, literal))
        if step < 0:
            demands.append((0, end, -step, None))
            level += step
    demands += [(origin, model.horizon, amount, literal) for origin, amount, literal in stack]
    return level


def _add_passing(model: WindowModel, stage: int, unit: int, window: set[int], demands: list[Demand]) -> None:
    """Append the demands of a unit's transient memory on a stage."""
    scaled = model.scaled
    merge = model.merge.get((stage, unit))
    passing = [int(amount) for amount in scaled.passing[:, stage, unit]]
    for kind, code in ((FORWARD, F), (BACK, I), (WEIGHT, W), (BACK, B)):
        node = scaled.node_number(kind, stage, unit)
        is_open = merge is not None and kind != FORWARD
        if not is_open and (node not in window or (kind == BACK and (code == B) != model.is_merged(stage, unit))):
            continue
        literal = None
        if is_open:
            literal = merge if code == B else model.is_parted(stage, unit)
        demands.append((model.start[node], model.end[node], passing[code], literal))


def _add_cumulative(model: WindowModel, demands: list[Demand], capacity: int) -> None:
    cp, intervals, amounts = model.cp, [], []
    for begin, end, amount, literal in demands:
        if amount <= 0 or (isinstance(begin, int) and isinstance(end, int) and begin >= end):
            continue
        size = cp.new_int_var(0, model.horizon, "")
        if literal is None:
            intervals.append(cp.new_interval_var(begin, size, end, ""))
        else:
            intervals.append(cp.new_optional_interval_var(begin, size, end, literal, ""))
        amounts.append(amount)
    if intervals:
        cp.add_cumulative(intervals, amounts, capacity)
