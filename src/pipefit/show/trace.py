"""The data type of a step in time, predicted or measured, and the reader of the traces that runs write.

`trace.json` in a run directory is one object with `format`, `version`, `plan` (its hash), `step` and `ranks`. A rank's
`spans` are its lane's actions in order: `["0F0", start_s, stop_s]`. An optional fourth number is the seconds that the
action first waited for data. docs/reference/report.md documents every field. All drawings take a `StepTrace`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipefit.cost.types import Array
from pipefit.errors import FormatError
from pipefit.plan.types import Plan
from pipefit.schedule.actions import Action
from pipefit.simulate.timeline import Timeline

FORMAT = "pipefit-trace"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """Actions of one lane (predicted) or one device (measured), in the order of its lane."""

    lane: int
    device: int | None = None
    "None for a prediction, which holds for all devices of the lane."
    actions: tuple[Action, ...]
    start_s: Array
    stop_s: Array
    wait_s: Array | None = None
    "Seconds that each action waited for data at its beginning; None if not recorded."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Values that one rank recorded beside its actions; None if not recorded."""

    rank: int
    data_s: float | None = None
    "Seconds spent preparing the step's data before the first action."
    memory_bytes: float | None = None
    "Peak memory of the device; on the CPU, of the process without Python and its libraries."
    core_share: float | None = None
    "Share of the time in which the process could compute and had a core of its machine, up to the traced step."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step in time. Seconds count from the start of the first action."""

    name: str
    "`predicted` or `measured`."
    rows: tuple[TraceRow, ...]
    step: int | None = None
    "Number of the step in the run, counted from 1; None for a prediction."
    facts: Mapping[int, DeviceFacts]
    "Recorded values by device; empty for a prediction."

    @property
    def stop_s(self) -> float:
        """End of the last action."""
        return max((float(row.stop_s.max()) for row in self.rows if len(row.stop_s)), default=0.0)


def from_timeline(timeline: Timeline) -> StepTrace:
    """Return the prediction as a trace: one row per lane, without receives, because their SENDs draw the transfers."""
    rows = []
    for lane, actions in enumerate(timeline.schedule.lanes):
        drawn = [index for index, action in enumerate(actions) if not action.kind.startswith("RECV")]
        rows.append(
            TraceRow(
                lane=lane,
                actions=tuple(actions[index] for index in drawn),
                start_s=timeline.starts_s[lane][drawn],
                stop_s=timeline.stops_s[lane][drawn],
            )
        )
    return StepTrace(name="predicted", rows=tuple(rows), facts={})


def trace_document(plan_hash: str, step: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of `trace.json`. An entry of `ranks` has rank, spans, and optionally data_s,
    memory_bytes and core_share."""
    return {"format": FORMAT, "version": VERSION, "plan": plan_hash, "step": step, "ranks": list(ranks)}


def read_trace(path: Path, plan: Plan) -> StepTrace | None:
    """Read the traced step of a run, with the ranks' clocks aligned. Returns None if there is no such file.

    Raises FormatError, with the position, for a file that is truncated, of another version or of another plan.
    """
    if not path.is_file():
        return None
    data = _load_document(path)
    _check_head(data, path, plan)
    schedule, lanes = plan.to_schedule(), _lanes_by_device(plan)
    rows: list[TraceRow] = []
    facts: dict[int, DeviceFacts] = {}
    for index, entry in enumerate(data["ranks"]):
        where = f"{path}: ranks[{index}]"
        device = _rank_device(entry, where, plan)
        if device in facts:
            raise FormatError("The trace has a rank twice.", where=where, seen=entry["rank"])
        lane = lanes[device]
        rows.append(_read_row(entry.get("spans"), where, lane, device, schedule.lanes[lane]))
        facts[device] = DeviceFacts(
            rank=entry["rank"],
            data_s=_read_fact(entry, "data_s", where),
            memory_bytes=_read_fact(entry, "memory_bytes", where),
            core_share=_read_fact(entry, "core_share", where),
        )
    rows.sort(key=lambda row: (row.lane, row.device or 0))
    return StepTrace(name="measured", rows=_align_rows(rows), step=data["step"], facts=facts)


def _lanes_by_device(plan: Plan) -> dict[int, int]:
    return {
        device: lane
        for stage, lane in enumerate(plan.order.placement)
        for device in plan.groups[plan.stages[stage].group].devices
    }


def _load_document(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError("The trace cannot be read.", where=str(path), seen=error) from None
    except json.JSONDecodeError as error:
        raise FormatError(
            "The trace is not valid JSON; it may have been cut short.",
            where=f"{path}, line {error.lineno}, column {error.colno}",
            seen=error.msg,
            next_step="trace the run again, or delete the file to report without it",
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(
            "The file is not a pipefit trace.", where=str(path), allowed=f'an object, "format": "{FORMAT}"'
        )
    return data


def _check_head(data: Mapping[str, Any], path: Path, plan: Plan) -> None:
    """Raise FormatError if the document is of another version or plan, or lacks its step or ranks."""
    if data.get("version") != VERSION:
        raise FormatError(
            "The trace is of another version.", where=str(path), seen=data.get("version"), allowed=str(VERSION)
        )
    if data.get("plan") != plan.content_hash:
        raise FormatError(
            "The trace is of another plan.",
            where=str(path),
            seen=data.get("plan"),
            allowed=f"plan {plan.content_hash}, the plan in this folder",
            next_step="trace the run again, or delete the file to report without it",
        )
    if isinstance(data.get("step"), bool) or not isinstance(data.get("step"), int):
        raise FormatError("The trace does not say which step it is of.", where=f"{path}: step", seen=data.get("step"))
    if not isinstance(data.get("ranks"), list) or not data["ranks"]:
        raise FormatError("The trace has no ranks.", where=f"{path}: ranks", allowed="a list with an entry a rank")


def _rank_device(entry: Any, where: str, plan: Plan) -> int:
    """Return the device of a rank's entry. Raises FormatError if the plan has no such rank."""
    rank = entry.get("rank") if isinstance(entry, dict) else None
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(plan.used_devices):
        raise FormatError(
            "The trace's rank is not one of the plan's.",
            where=where,
            seen=json.dumps(rank),
            allowed=f"0 to {len(plan.used_devices) - 1}",
        )
    return plan.used_devices[rank]


def _read_row(spans: Any, where: str, lane: int, device: int, actions: tuple[Action, ...]) -> TraceRow:
    if not isinstance(spans, list) or len(spans) != len(actions):
        raise FormatError(
            "The trace and the lane have different numbers of actions.",
            where=where,
            seen=f"{len(spans)} actions" if isinstance(spans, list) else "no spans",
            allowed=f"{len(actions)}, as lane {lane}",
        )
    numbers = np.zeros((len(spans), 3))
    waits = 0
    for index, (span, action) in enumerate(zip(spans, actions, strict=True)):
        span_where = f"{where}.spans[{index}]"
        if not isinstance(span, list) or len(span) not in (3, 4) or not all(map(_is_time, span[1:])):
            raise FormatError(
                "This is not an action with its times.",
                where=span_where,
                seen=json.dumps(span)[:60],
                allowed='["0F0", start_s, stop_s] or ["0F0", start_s, stop_s, wait_s], seconds from 0',
            )
        if span[0] != str(action):
            raise FormatError("The trace is of another schedule.", where=span_where, seen=span[0], allowed=str(action))
        if span[2] < span[1]:
            raise FormatError("The action stops before it starts.", where=span_where, seen=json.dumps(span))
        numbers[index, : len(span) - 1] = span[1:]
        waits += len(span) == 4
    start_s, stop_s, wait_s = numbers.T
    return TraceRow(
        lane=lane,
        device=device,
        actions=actions,
        start_s=start_s,
        stop_s=stop_s,
        wait_s=np.minimum(wait_s, stop_s - start_s) if waits else None,
    )


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _read_fact(entry: Mapping[str, Any], name: str, where: str) -> float | None:
    value = entry.get(name)
    if value is not None and not _is_time(value):
        raise FormatError("The value is not a number from 0.", where=f"{where}.{name}", seen=json.dumps(value))
    return value


def _align_rows(rows: Sequence[TraceRow]) -> tuple[TraceRow, ...]:
    """Shift the rows to one clock whose 0 is the earliest start.

    Every rank counts from its own start of the step. NORM ends with an all-reduce over all ranks, at the same moment
    everywhere (within a message's latency). The rows are shifted so that these moments coincide.
    """
    moments = []
    for row in rows:
        norms = [index for index, action in enumerate(row.actions) if action.kind == "NORM"]
        moments.append(float(row.stop_s[norms[-1]]) if norms else None)
    if any(moment is None for moment in moments):
        shifts = [0.0] * len(rows)
    else:
        latest = max(moment for moment in moments if moment is not None)
        shifts = [latest - moment for moment in moments if moment is not None]
    starts = [float(row.start_s.min()) + shift for row, shift in zip(rows, shifts, strict=True) if row.actions]
    first = min(starts, default=0.0)
    return tuple(
        TraceRow(
            lane=row.lane,
            device=row.device,
            actions=row.actions,
            start_s=row.start_s + (shift - first),
            stop_s=row.stop_s + (shift - first),
            wait_s=row.wait_s,
        )
        for row, shift in zip(rows, shifts, strict=True)
    )
