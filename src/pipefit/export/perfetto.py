"""The timeline of a plan for Perfetto and chrome://tracing: predicted, and measured if a run was traced."""

from __future__ import annotations

from pipefit.export.base import ExportSource, PlanExporter
from pipefit.show.perfetto import perfetto_text, subject_traces


def write_traces(source: ExportSource) -> str:
    """Return the traces as JSON in the Chrome trace event format."""
    return perfetto_text(subject_traces(source.subject), source.subject.simulation.timeline)


EXPORTER = PlanExporter(
    name="perfetto", summary="timelines for Perfetto or chrome://tracing", suffix=".trace.json", write=write_traces
)
