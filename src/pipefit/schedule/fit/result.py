"""What fitting a schedule returns: the schedule, how good it is, and how it was found."""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.schedule.actions import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The best schedule found, with a bound that no schedule can go below."""

    schedule: Schedule
    'Computed; its name is "fit".'
    time_s: float
    "The objective, by the simulator."
    bound_s: float
    "No schedule takes less."
    bubble: float
    "1 - work of the busiest lane / time."
    recompute: tuple[str, ...]
    "Per stage: the choice among the options; empty where there were none."
    peak_bytes: tuple[float, ...]
    "Per lane, static bytes and receive buffers included."
    how: str
    "The construction that it began as, and what improved it."
    moves: int = 0
    "Moves that were tried."
    notes: tuple[str, ...] = ()

    @property
    def relative_gap(self) -> float:
        """How much of the time the bound leaves open: 0 is proven optimal."""
        return (self.time_s - self.bound_s) / self.time_s
