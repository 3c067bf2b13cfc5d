"""The table of `pipefit compare`: several plans or runs of one model and batch side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipefit.errors import PlanError
from pipefit.plan.explain.text import TextTable
from pipefit.plan.types import Plan
from pipefit.show.figures import COLUMNS, FigurePair, ReportColumn, figures_of
from pipefit.show.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedEntry:
    """One plan or run of a comparison."""

    path: str
    plan: Plan
    figures: Mapping[str, FigurePair]
    "By the names of the report's columns."
    has_run: bool


def compare_entries(opened: Sequence[tuple[Path, Plan, RunRecord | None]]) -> tuple[ComparedEntry, ...]:
    """Return the entries in the given order. Raises PlanError if models or batches differ, or a prediction is
    missing."""
    first_path, first, _ = opened[0]
    for path, plan, _ in opened[1:]:
        for what, first_value, second_value in _list_differences(first, plan):
            raise PlanError(
                f"Only plans of the same model and batch can be compared: the {what} differs.",
                where=f"{first_path}, {path}",
                seen=f"{first_value} and {second_value}",
                next_step="compare plans made with the same --model, --batch and --seq",
            )
    return tuple(
        ComparedEntry(path=str(path), plan=plan, figures=figures_of(plan, record), has_run=record is not None)
        for path, plan, record in opened
    )


def as_data(entry: ComparedEntry) -> Mapping[str, Any]:
    """Return an entry as JSON data; unknown values are null."""
    pairs = {name: {"predicted": pair.predicted, "measured": pair.measured} for name, pair in entry.figures.items()}
    return {"path": entry.path, "plan": entry.plan.content_hash, "decisions": dict(entry.plan.decisions), **pairs}


def compare_table(entries: Sequence[ComparedEntry]) -> TextTable:
    """Return a table with a row per prediction, followed by a row of measurements and a row of prediction errors."""
    shown = [column for name, column in COLUMNS.items() if any(name in entry.figures for entry in entries)]
    varied = [key for key in entries[0].plan.decisions if len({e.plan.decisions.get(key, "") for e in entries}) > 1]
    rows = []
    for entry in entries:
        choices = [entry.plan.decisions.get(key, "") for key in varied]
        predicted = _figure_cells(shown, entry.figures, lambda pair: pair.predicted)
        rows.append((entry.path, *choices, "predicted", *predicted))
        if entry.has_run:
            blank = [""] * (1 + len(varied))
            rows.append((*blank, "measured", *_figure_cells(shown, entry.figures, lambda pair: pair.measured)))
            rows.append((*blank, "error", *_error_cells(shown, entry.figures)))
    job = entries[0].plan.job
    return TextTable(
        title=f"{entries[0].plan.model.name}, batch {job.batch} x {job.sequence} tokens",
        columns=("plan", *varied, "", *(column.heading for column in shown)),
        rows=tuple(rows),
    )


def _figure_cells(
    shown: Sequence[ReportColumn],
    figures: Mapping[str, FigurePair],
    choose_value: Callable[[FigurePair], float | None],
) -> list[str]:
    values = [(choose_value(figures.get(column.name, FigurePair())), column.format_value) for column in shown]
    return ["-" if value is None else form(value) for value, form in values]


def _error_cells(shown: Sequence[ReportColumn], figures: Mapping[str, FigurePair]) -> list[str]:
    return [_error_cell(figures.get(column.name, FigurePair()), column.is_share) for column in shown]


def _error_cell(pair: FigurePair, is_share: bool) -> str:
    if pair.predicted is None or pair.measured is None:
        return "-"
    if is_share:
        return f"{100 * (pair.predicted - pair.measured):+.1f} points"
    return f"{pair.relative_error:+.1%}" if pair.relative_error is not None else "-"


def _list_differences(one: Plan, other: Plan) -> list[tuple[str, object, object]]:
    differences: list[tuple[str, object, object]] = []
    if one.hashes.model != other.hashes.model or one.model.config != other.model.config:
        differences.append(
            ("model", f"{one.model.name} ({one.hashes.model})", f"{other.model.name} ({other.hashes.model})")
        )
    if one.job.batch != other.job.batch:
        differences.append(("batch", one.job.batch, other.job.batch))
    if one.job.sequence != other.job.sequence:
        differences.append(("sequence length", one.job.sequence, other.job.sequence))
    return differences
