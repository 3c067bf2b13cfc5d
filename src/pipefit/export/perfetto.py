"""The timeline of a plan for Perfetto and chrome://tracing: predicted, and measured if a run was traced."""

from __future__ import annotations

import json

from pipefit.export.base import ExportSource, PlanExporter
from pipefit.show.perfetto import perfetto_document
from pipefit.show.trace import from_timeline


def write_traces(source: ExportSource) -> str:
    """Return the traces as JSON in the Chrome trace event format."""
    timeline, record = source.subject.simulation.timeline, source.record
    traces = [from_timeline(timeline)]
    if record is not None and record.trace is not None:
        traces.append(record.trace)
    return json.dumps(perfetto_document(traces, timeline), separators=(",", ":")) + "\n"


EXPORTER = PlanExporter(
    name="perfetto", summary="timelines for Perfetto or chrome://tracing", suffix=".trace.json", write=write_traces
)
