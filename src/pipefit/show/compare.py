"""Several plans or runs of one model and batch side by side: the rows of `pipefit compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipefit.errors import PlanError
from pipefit.plan.types import Plan
from pipefit.show.figures import Figures, figures_of
from pipefit.show.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One of the things that are compared."""

    path: str
    plan: Plan
    figures: Figures
    has_run: bool

    @property
    def name(self) -> str:
        """The decisions in short: replicas x stages x shards, microbatches, schedule."""
        words = self.plan.decisions
        layout = " x ".join(
            f"{words[key]} {key}" for key in ("replicas", "stages", "shards") if words.get(key, "1") != "1"
        )
        return f"{layout or '1 device'}, {self.plan.order.microbatches} microbatches, {self.plan.order.name}"


def compare(opened: Sequence[tuple[Path, Plan, RunRecord | None]]) -> tuple[Entry, ...]:
    """The entries in the order given. Raises PlanError where models or batches differ, or a prediction is missing."""
    first_path, first, _ = opened[0]
    for path, plan, _ in opened[1:]:
        for what, one, other in _differences(first, plan):
            raise PlanError(
                f"Only plans of the same model and batch can be compared: the {what} differs.",
                where=f"{first_path}, {path}",
                seen=f"{one} and {other}",
                next_step="compare plans made with the same --model, --batch and --seq",
            )
    return tuple(
        Entry(path=str(path), plan=plan, figures=figures_of(plan, record), has_run=record is not None)
        for path, plan, record in opened
    )


def as_data(entry: Entry) -> Mapping[str, Any]:
    """An entry as JSON data; what is not known is null."""
    pairs = {
        field.name: {
            "predicted": getattr(entry.figures, field.name).predicted,
            "measured": getattr(entry.figures, field.name).measured,
        }
        for field in fields(Figures)
    }
    return {"path": entry.path, "plan": entry.plan.hash, "decisions": dict(entry.plan.decisions), **pairs}


def _differences(one: Plan, other: Plan) -> list[tuple[str, object, object]]:
    found: list[tuple[str, object, object]] = []
    if one.hashes.model != other.hashes.model or one.model.config != other.model.config:
        found.append(("model", f"{one.model.name} ({one.hashes.model})", f"{other.model.name} ({other.hashes.model})"))
    if one.job.batch != other.job.batch:
        found.append(("batch", one.job.batch, other.job.batch))
    if one.job.sequence != other.job.sequence:
        found.append(("sequence length", one.job.sequence, other.job.sequence))
    return found
