"""Results of a validation: rows with published and predicted numbers, the fitted constants, and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """One published number and its prediction."""

    name: str
    published: float
    predicted: float
    part: str = "predicted"
    "`predicted` counts towards the targets. Any other text is the reason why the row is reported separately."

    @property
    def relative_delta(self) -> float:
        """(predicted - published) / published."""
        return self.predicted / self.published - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTarget:
    """A value and its upper limit."""

    what: str
    reached: float
    limit: float

    @property
    def is_met(self) -> bool:
        return bool(self.reached <= self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """Predictions of one quantity of one data set."""

    set: str
    quantity: str
    unit: str
    source: str
    split: str
    "Description of the fitted and the predicted rows."
    fitted: Mapping[str, tuple[float, ...]]
    "Value of each fitted constant in every part of the split."
    constants: int
    "Number of values that one part of the split fits."
    rows: tuple[ValidationRow, ...]
    summary: Mapping[str, float]
    targets: tuple[ErrorTarget, ...]
    notes: tuple[str, ...] = field(default=())


def absolute_errors(rows: Sequence[ValidationRow], part: str = "predicted") -> list[float]:
    """Return the absolute relative errors of the rows of one part."""
    return [abs(row.relative_delta) for row in rows if row.part == part]


def mean_or_zero(values: Sequence[float]) -> float:
    """Return the mean, or 0 without values."""
    return fsum(values) / len(values) if values else 0.0
