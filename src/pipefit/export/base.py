"""The interface of an exporter: a name, and a function from a plan to the text of a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipefit.plan.types import Plan
from pipefit.show.record import RunRecord
from pipefit.show.subject import ReportSubject, open_plan_or_run, resolve_subject


class ExportSource:
    """The plan to export. Its model and cluster are opened and simulated on request only."""

    def __init__(self, path: Path, cluster: str = "", model: str = "") -> None:
        """Open a plan file or a run directory. `cluster` and `model` override the plan's, unless ''. Raises FormatError
        for another path."""
        self.path = path
        self.plan: Plan
        self.record: RunRecord | None
        self.plan, self.record = open_plan_or_run(path)
        self._cluster, self._model = cluster, model

    @cached_property
    def subject(self) -> ReportSubject:
        """Plan, model, cluster and a new simulation. Raises the errors of `show.subject.open_subject`."""
        return resolve_subject(self.plan, self.record, self.path, self._cluster, self._model)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExporter:
    """The exporter of one target."""

    name: str
    summary: str
    suffix: str
    "Suffix of the file, with its dot; `plan.json` is written to `plan` + suffix by default."
    write: Callable[[ExportSource], str]
    "Returns the text of the file. Raises PipefitError for a plan that the target cannot express."
