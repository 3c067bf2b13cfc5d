"""Traces for Perfetto and chrome://tracing, in the Chrome JSON trace event format.

Each trace (predicted, measured) is a process with two threads per row: the device's actions and its links' actions.
Flow arrows join transfers to the actions that use them; predicted memory is a counter. Times are in microseconds, as
the format requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipefit.codec import write_file
from pipefit.schedule.actions import TRANSFER, Action
from pipefit.show.subject import ReportSubject
from pipefit.show.trace import StepTrace, TraceRow, from_timeline
from pipefit.simulate.timeline import Timeline

TraceEvent = dict[str, Any]

LINK = (*TRANSFER, "REDUCE", "GATHER")
"""Actions that run on a device's links beside its compute."""


def write_perfetto(path: Path, traces: Sequence[StepTrace], timeline: Timeline | None = None) -> None:
    """Write the text of `perfetto_text` to a file."""
    write_file(path, perfetto_text(traces, timeline), "trace")


def perfetto_text(traces: Sequence[StepTrace], timeline: Timeline | None = None) -> str:
    """Return the traces as JSON, with the memory curves of `timeline` (the prediction) as counters."""
    return json.dumps(perfetto_document(traces, timeline), separators=(",", ":")) + "\n"


def subject_traces(subject: ReportSubject) -> list[StepTrace]:
    """Return the predicted trace of a subject, and the measured one if its run was traced."""
    traces = [from_timeline(subject.simulation.timeline)]
    if subject.record is not None and subject.record.trace is not None:
        traces.append(subject.record.trace)
    return traces


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write a simulated timeline with its memory, for `pipefit simulate --trace`."""
    write_perfetto(path, [from_timeline(timeline)], timeline)


def perfetto_document(traces: Sequence[StepTrace], timeline: Timeline | None = None) -> dict[str, Any]:
    """Return the trace document; the actions of a row are in the order of its lane."""
    events: list[TraceEvent] = []
    for process, trace in enumerate(traces, 1):
        events += _process_events(process, trace)
        if timeline is not None and trace.name == "predicted":
            events += _memory_events(process, timeline)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _process_events(process: int, trace: StepTrace) -> Iterator[TraceEvent]:
    name = trace.name if trace.step is None else f"{trace.name}, step {trace.step}"
    yield _name_event("process_name", process, 0, name)
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for index, row in enumerate(trace.rows):
        label = f"lane {row.lane}" + ("" if row.device is None else f", device {row.device}")
        yield _name_event("thread_name", process, 2 * index + 1, label)
        yield _name_event("thread_name", process, 2 * index + 2, f"{label}, links")
        yield from _row_events(process, 2 * index + 1, row)
    if all(row.device is None for row in trace.rows):
        yield from _flow_events(process, trace)


def _row_events(process: int, thread: int, row: TraceRow) -> Iterator[TraceEvent]:
    """Yield the row's actions; link actions are on the thread below."""
    for action, start_s, stop_s in zip(row.actions, row.start_s.tolist(), row.stop_s.tolist(), strict=True):
        yield {
            "ph": "X",
            "name": str(action),
            "cat": action.kind,
            "pid": process,
            "tid": thread + (action.kind in LINK),
            "ts": start_s * 1e6,
            "dur": (stop_s - start_s) * 1e6,
            "args": _event_arguments(action),
        }


def _flow_events(process: int, trace: StepTrace) -> Iterator[TraceEvent]:
    """Yield arrows from each SEND to the compute action of the peer stage that uses its tensor."""
    sends: dict[tuple[str, int, int, int], list[tuple[int, float]]] = {}
    for index, row in enumerate(trace.rows):
        for action, start_s in zip(row.actions, row.start_s.tolist(), strict=True):
            if action.kind.startswith("SEND"):
                key = (action.kind[-1], action.peer, action.microbatch, action.slice)
                sends.setdefault(key, []).append((2 * index + 2, start_s * 1e6))
    number = 0
    for index, row in enumerate(trace.rows):
        for action, start_s in zip(row.actions, row.start_s.tolist(), strict=True):
            if action.kind not in ("F", "I", "B"):
                continue
            direction = "F" if action.kind == "F" else "B"
            for thread, sent_us in sends.get((direction, action.stage, action.microbatch, action.slice), ()):
                number += 1
                common = {"name": "transfer", "cat": "transfer", "id": number, "pid": process}
                yield {"ph": "s", **common, "tid": thread, "ts": sent_us}
                yield {"ph": "f", "bp": "e", **common, "tid": 2 * index + 1, "ts": start_s * 1e6}


def _memory_events(process: int, timeline: Timeline) -> Iterator[TraceEvent]:
    for lane, curve in enumerate(timeline.lane_memory):
        for time_s, size in zip(curve.time_s.tolist(), curve.bytes.tolist(), strict=True):
            yield {
                "ph": "C",
                "name": f"memory of lane {lane}",
                "pid": process,
                "tid": 0,
                "ts": time_s * 1e6,
                "args": {"bytes": size},
            }


def _event_arguments(action: Action) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if action.stage >= 0:
        arguments["stage"] = action.stage
    if action.microbatch >= 0:
        arguments["microbatch"], arguments["slice"] = action.microbatch, action.slice
    if action.peer >= 0:
        arguments["peer"] = action.peer
    if action.what:
        arguments["what"] = action.what
    return arguments


def _name_event(what: str, process: int, thread: int, text: str) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": text}}
