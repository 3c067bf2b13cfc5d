"""The schedule of a plan as CSV for `torch.distributed.pipelining`: its compute actions, a row for each lane."""

from __future__ import annotations

from pipefit.export.base import ExportSource, PlanExporter
from pipefit.schedule.text.csv_io import to_csv


def write_schedule(source: ExportSource) -> str:
    """Return the CSV. Raises ScheduleError for a plan with token slices, which the format cannot express."""
    return to_csv(source.plan.to_schedule())


EXPORTER = PlanExporter(
    name="torch-csv",
    summary="compute actions for torch.distributed.pipelining",
    suffix=".csv",
    write=write_schedule,
)
