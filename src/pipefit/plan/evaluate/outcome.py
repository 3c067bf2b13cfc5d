"""What a search finds: the plans that were simulated and fit, those that do not fit, and what was left open."""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.plan.assemble.pipeline_work import PlanSkeleton
from pipefit.plan.assemble.predict import PlanSimulation
from pipefit.plan.request.decisions import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPlan:
    """A simulated candidate."""

    decisions: ParallelConfig
    "With its cuts."
    parts: PlanSkeleton
    simulation: PlanSimulation

    @property
    def step_s(self) -> float:
        return self.simulation.timeline.makespan_s

    @property
    def worst_lane(self) -> int:
        """The lane that is fullest for its limit."""
        limits, peaks = self.simulation.limits_bytes, self.simulation.peaks_bytes
        return max(range(len(limits)), key=lambda lane: peaks[lane] / limits[lane])

    @property
    def peak_bytes(self) -> float:
        return self.simulation.peaks_bytes[self.worst_lane]

    @property
    def limit_bytes(self) -> float:
        return self.simulation.limits_bytes[self.worst_lane]

    @property
    def rank_key(self) -> tuple[float, float, int, int]:
        """Faster first; among equally fast ones (within TIE) less memory, fewer devices, fewer stages."""
        return (float(f"{self.step_s:.9e}"), self.peak_bytes, self.decisions.device_count, self.decisions.stage_count)


@dataclass(frozen=True, slots=True)
class InfeasiblePlan:
    """A candidate that cannot fit, by the closed form or by simulation."""

    decisions: ParallelConfig
    bound_s: float
    "It would take at least this long."
    peak_bytes: float
    limit_bytes: float
    lane: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The outcome of a search."""

    fitting: tuple[EvaluatedPlan, ...]
    "Simulated and fitting, the best first; empty where nothing fits."
    misfits: tuple[InfeasiblePlan, ...]
    "Of what did not fit the most telling ones, the fastest first; the closest of all where nothing fits."
    unfit: int
    "How many candidates that were looked at did not fit."
    lower_bound_s: float
    "No plan of the space is faster: the least closed-form bound of all, fitting or not."
    open_bound_s: float
    "The least bound of what was not looked at to its end; above the best time, unless the budget was spent."
    considered: int
    simulated: int
    fitted: int = 0
    "Orders that were made for a layout and beat every family."
