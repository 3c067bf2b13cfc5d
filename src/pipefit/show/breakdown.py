"""Breakdown of a step on every device: compute, exposed communication, idle, optimizer, data.

The parts of a device add up to the step. Communication counts only while exposed: a transfer or reduction that overlaps
with compute costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from pipefit.cost.types import Array
from pipefit.plan.types import Plan
from pipefit.schedule.actions import COMPUTE, Action
from pipefit.show.trace import StepTrace, TraceRow
from pipefit.simulate.timeline import Timeline

TIME_PARTS = ("compute", "communication", "idle", "optimizer", "data")
"""Parts in display order; `communication` is exposed communication."""

TimeSpans = list[tuple[float, float]]

Transfer = tuple[str, int, int, str, int, int]
"""(direction, from stage, to stage, tensor, microbatch, slice)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Parts of one lane's or device's step, in seconds."""

    lane: int
    device: int | None
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return fsum(self.seconds.values())


def predicted_breakdown(timeline: Timeline) -> tuple[StepBreakdown, ...]:
    """Return one entry per lane. Idle is the simulator's idle time less exposed transfers and reductions."""
    result = []
    for lane, actions in enumerate(timeline.schedule.lanes):
        start_s, stop_s = timeline.starts_s[lane], timeline.stops_s[lane]
        compute = _action_runs(actions, start_s, stop_s, COMPUTE)
        optimizer = _action_runs(actions, start_s, stop_s, ("NORM", "STEP"))
        rings = _action_runs(actions, start_s, stop_s, ("REDUCE", "GATHER"))
        busy = _merge_runs(compute + optimizer)
        waits = (
            float(timeline.exposed_transfer_s[lane]) + _total_length(_merge_runs(rings + busy)) - _total_length(busy)
        )
        compute_s, optimizer_s = _total_length(_merge_runs(compute)), _total_length(_merge_runs(optimizer))
        free = max(0.0, timeline.makespan_s - compute_s - optimizer_s)
        exposed = min(waits, free)
        seconds = {
            "compute": compute_s,
            "communication": exposed,
            "idle": free - exposed,
            "optimizer": optimizer_s,
            "data": 0.0,
        }
        result.append(StepBreakdown(lane=lane, device=None, seconds=seconds))
    return tuple(result)


def measured_breakdown(trace: StepTrace, plan: Plan) -> tuple[StepBreakdown, ...]:
    """Return one entry per device.

    The wait of an action is idle time until the sender begins to send, and exposed communication after that. If waits
    were not recorded, the second part cannot be told from computing and counts as compute. In NORM a device is idle
    until the last device arrives; the rest is waiting for reductions.
    """
    sends = _send_starts(trace.rows, plan)
    step_s = trace.stop_s
    result = []
    for row in with_waits(trace, plan).rows:
        seconds = _measured_parts(row, _early_s(row, _sent_s(row, sends, plan)))
        facts = trace.facts.get(row.device) if row.device is not None else None
        seconds["data"] = (facts.data_s or 0.0) if facts else 0.0
        seconds["idle"] += max(0.0, step_s + seconds["data"] - fsum(seconds.values()))
        result.append(StepBreakdown(lane=row.lane, device=row.device, seconds=seconds))
    return tuple(result)


def with_waits(trace: StepTrace, plan: Plan) -> StepTrace:
    """Return the trace with the wait of every action: as recorded, or until its sender began. In NORM the wait is for
    the last device."""
    sends = _send_starts(trace.rows, plan)
    norms = [_action_runs(row.actions, row.start_s, row.stop_s, ("NORM",)) for row in trace.rows]
    last_norm_s = max((start for runs in norms for start, _ in runs), default=0.0)
    rows = []
    for row in trace.rows:
        wait_s = _early_s(row, _sent_s(row, sends, plan)) if row.wait_s is None else row.wait_s.copy()
        for index, action in enumerate(row.actions):
            if action.kind == "NORM":
                wait_s[index] = min(max(0.0, last_norm_s - row.start_s[index]), row.stop_s[index] - row.start_s[index])
        rows.append(replace(row, wait_s=wait_s))
    return replace(trace, rows=tuple(rows))


def _early_s(row: TraceRow, sent_s: Array) -> Array:
    """Return the time by which each action began before its sender, at most its full duration."""
    return np.minimum(np.maximum(sent_s - row.start_s, 0.0), row.stop_s - row.start_s)


def _measured_parts(row: TraceRow, early_s: Array) -> dict[str, float]:
    """Return the seconds by part over the actions of a row with waits."""
    assert row.wait_s is not None, "the row comes from with_waits"
    seconds = dict.fromkeys(TIME_PARTS, 0.0)
    columns = zip((row.stop_s - row.start_s).tolist(), row.wait_s.tolist(), early_s.tolist(), strict=True)
    for action, (length, wait, early) in zip(row.actions, columns, strict=True):
        if action.kind in COMPUTE:
            idle = min(early, wait)
            seconds["idle"] += idle
            seconds["communication"] += wait - idle
            seconds["compute"] += length - wait
        elif action.kind == "STEP":
            seconds["optimizer"] += length
        elif action.kind == "NORM":
            seconds["idle"] += wait
            seconds["communication"] += length - wait
        else:
            seconds["communication"] += length
    return seconds


def _send_starts(rows: Sequence[TraceRow], plan: Plan) -> dict[Transfer, dict[int, float]]:
    """Return the start of each transfer, by its content and then by the sender's index in its group."""
    starts: dict[Transfer, dict[int, float]] = {}
    for row in rows:
        assert row.device is not None, "a measured row is of a device"
        position = plan.lane_mesh(row.lane).devices.index(row.device)
        for action, start in zip(row.actions, row.start_s, strict=True):
            if action.kind.startswith("SEND"):
                key = (action.kind[-1], action.stage, action.peer, action.what, action.microbatch, action.slice)
                starts.setdefault(key, {})[position] = float(start)
    return starts


def _sent_s(row: TraceRow, sends: Mapping[Transfer, Mapping[int, float]], plan: Plan) -> Array:
    """Return, for each action of a row, the latest start of the transfers that bring its inputs; 0 without any.

    Between groups of equal size a device receives from the device of the same index. Otherwise it may receive from any
    of them, and the last start counts.
    """
    assert row.device is not None, "a measured row is of a device"
    group = plan.lane_mesh(row.lane)
    position = group.devices.index(row.device)
    sources: dict[tuple[str, int], set[tuple[int, str]]] = {}
    for action in row.actions:
        if action.kind.startswith("RECV"):
            sources.setdefault((action.kind[-1], action.stage), set()).add((action.peer, action.what))
    sent_s = np.zeros(len(row.actions))
    for index, action in enumerate(row.actions):
        direction = "F" if action.kind == "F" else "B"
        if action.kind not in ("F", "I", "B"):
            continue
        for peer, what in sources.get((direction, action.stage), ()):
            starts = sends.get((direction, peer, action.stage, what, action.microbatch, action.slice), {})
            equal = plan.lane_mesh(plan.order.placement[peer]).size == group.size and position in starts
            sent_s[index] = max(sent_s[index], starts[position] if equal else max(starts.values(), default=0.0))
    return sent_s


def _action_runs(actions: Sequence[Action], start_s: Array, stop_s: Array, kinds: Sequence[str]) -> TimeSpans:
    return [
        (float(start), float(stop))
        for action, start, stop in zip(actions, start_s, stop_s, strict=True)
        if action.kind in kinds
    ]


def _merge_runs(runs: TimeSpans) -> TimeSpans:
    merged: TimeSpans = []
    for start, stop in sorted(runs):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _total_length(runs: TimeSpans) -> float:
    return float(np.sum([stop - start for start, stop in runs])) if runs else 0.0
