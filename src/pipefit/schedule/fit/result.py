"""The result of fitting a schedule: the schedule, its quality and its origin."""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.schedule.actions import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The best schedule found, with a lower bound on the time of every schedule."""

    schedule: Schedule
    'Computed; its name is "fit".'
    time_s: float
    "The objective, by the simulator."
    bound_s: float
    "Lower bound on the objective of every schedule."
    bubble: float
    "1 - work of the busiest lane / time."
    recompute: tuple[str, ...]
    "By stage: the choice among the options; empty without options."
    peak_bytes: tuple[float, ...]
    "By lane, with static bytes and receive buffers."
    how: str
    "The construction that the search began with, and the methods that improved it."
    moves: int = 0
    "Moves that were tried."
    notes: tuple[str, ...] = ()

    @property
    def relative_gap(self) -> float:
        """The gap between time and bound, relative to the time: 0 is proven optimal."""
        return (self.time_s - self.bound_s) / self.time_s
