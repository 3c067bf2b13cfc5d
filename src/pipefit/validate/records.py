"""What a validation says: rows with published and predicted numbers, what was fitted to which rows, and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """One published number and its prediction."""

    name: str
    published: float
    predicted: float
    part: str = "predicted"
    "`predicted` counts towards the targets; anything else is reported apart, and says why."

    @property
    def relative_delta(self) -> float:
        """Predicted less published, as a share of the published."""
        return self.predicted / self.published - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTarget:
    """A figure that must not be larger than a limit."""

    what: str
    reached: float
    limit: float

    @property
    def is_met(self) -> bool:
        return bool(self.reached <= self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """The predictions of one quantity of one data set."""

    set: str
    quantity: str
    unit: str
    source: str
    split: str
    "In words: what is fitted to which rows, and which rows are predicted."
    fitted: Mapping[str, tuple[float, ...]]
    "Fitted constant -> its value in every part of the split."
    constants: int
    "How many numbers one part of the split fits."
    rows: tuple[ValidationRow, ...]
    summary: Mapping[str, float]
    targets: tuple[ErrorTarget, ...]
    notes: tuple[str, ...] = field(default=())


def absolute_errors(rows: Sequence[ValidationRow], part: str = "predicted") -> list[float]:
    """Absolute relative errors of the rows of one part."""
    return [abs(row.relative_delta) for row in rows if row.part == part]


def mean_or_zero(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
