"""The table of `pipefit compare`: several plans or runs of one model and batch side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipefit.errors import PlanError
from pipefit.plan.explain.text import TextTable
from pipefit.plan.types import Plan
from pipefit.show.figures import FigurePair, RunFigures, figures_of, format_percent
from pipefit.show.record import RunRecord
from pipefit.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedEntry:
    """One plan or run of a comparison."""

    path: str
    plan: Plan
    figures: RunFigures
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
    pairs = {
        field.name: {
            "predicted": getattr(entry.figures, field.name).predicted,
            "measured": getattr(entry.figures, field.name).measured,
        }
        for field in fields(RunFigures)
    }
    return {"path": entry.path, "plan": entry.plan.content_hash, "decisions": dict(entry.plan.decisions), **pairs}


def compare_table(entries: Sequence[ComparedEntry]) -> TextTable:
    """Return a table with a row per prediction, followed by a row of measurements and a row of prediction errors."""
    varied = [key for key in entries[0].plan.decisions if len({e.plan.decisions.get(key, "") for e in entries}) > 1]
    rows = []
    for entry in entries:
        choices = [entry.plan.decisions.get(key, "") for key in varied]
        rows.append((entry.path, *choices, "predicted", *_figure_cells(entry.figures, lambda pair: pair.predicted)))
        if entry.has_run:
            blank = [""] * (1 + len(varied))
            rows.append((*blank, "measured", *_figure_cells(entry.figures, lambda pair: pair.measured)))
            rows.append((*blank, "error", *(_error_cell(pick(entry.figures), share) for _, pick, _, share in COLUMNS)))
    job = entries[0].plan.job
    return TextTable(
        title=f"{entries[0].plan.model.name}, batch {job.batch} x {job.sequence} tokens",
        columns=("plan", *varied, "", *(name for name, _, _, _ in COLUMNS)),
        rows=tuple(rows),
    )


COLUMNS: tuple[tuple[str, Callable[[RunFigures], FigurePair], Callable[[float], str], bool], ...] = (
    ("step", lambda figures: figures.step_s, format_seconds, False),
    ("tokens/s", lambda figures: figures.tokens_per_s, format_count, False),
    ("idle", lambda figures: figures.idle_share, format_percent, True),
    ("peak memory", lambda figures: figures.peak_bytes, format_bytes, False),
    ("of limit", lambda figures: figures.peak_share, format_percent, True),
)
"""Heading, figure, formatter, and a flag for shares, whose error is in percentage points."""


def _figure_cells(figures: RunFigures, which: Callable[[FigurePair], float | None]) -> list[str]:
    values = [(which(pick(figures)), form) for _, pick, form, _ in COLUMNS]
    return ["-" if value is None else form(value) for value, form in values]


def _error_cell(pair: FigurePair, share: bool) -> str:
    if pair.predicted is None or pair.measured is None:
        return "-"
    if share:
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
