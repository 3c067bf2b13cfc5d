"""The result of a search: simulated plans that fit, candidates that do not, and the candidates left open."""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.plan.assemble.pipeline_work import PlanSkeleton
from pipefit.plan.assemble.predict import PlanSimulation
from pipefit.plan.request.decisions import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPlan:
    """A simulated candidate."""

    decisions: ParallelConfig
    "The choices, with the layer cuts."
    parts: PlanSkeleton
    simulation: PlanSimulation

    @property
    def step_s(self) -> float:
        return self.simulation.timeline.makespan_s

    @property
    def worst_lane(self) -> int:
        """The lane that is fullest relative to its limit."""
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
        """Sort key: step time (to ten digits), then memory, number of devices and number of stages."""
        return (float(f"{self.step_s:.9e}"), self.peak_bytes, self.decisions.device_count, self.decisions.stage_count)


@dataclass(frozen=True, slots=True)
class InfeasiblePlan:
    """A candidate that cannot fit, by the closed form or by simulation."""

    decisions: ParallelConfig
    bound_s: float
    "Lower bound of its step time."
    peak_bytes: float
    limit_bytes: float
    lane: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The outcome of a search."""

    fitting: tuple[EvaluatedPlan, ...]
    "Simulated plans that fit, the best first; empty if none fits."
    misfits: tuple[InfeasiblePlan, ...]
    "The most informative plans that do not fit, the fastest first; the closest one if none fits."
    unfit: int
    "Number of candidates that did not fit."
    lower_bound_s: float
    "Least closed-form bound of all candidates, fitting or not: no plan of the space is faster."
    open_bound_s: float
    "Least bound of the candidates that were not fully evaluated; above the best time unless the budget was spent."
    considered: int
    simulated: int
    fitted: int = 0
    "Number of orders fitted to a layout that beat every family."

    @property
    def closest_misfit(self) -> InfeasiblePlan | None:
        """Return the plan that lacks the least memory; None if none is known."""
        return min(self.misfits, key=lambda misfit: misfit.peak_bytes - misfit.limit_bytes, default=None)

    def leaves_to_gain(self, fraction: float) -> bool:
        """Return whether the best plan is above the lower bound by more than this fraction."""
        return not self.fitting or self.fitting[0].step_s > self.lower_bound_s * (1 + fraction)


def merge_results(found: SearchResult, more: SearchResult) -> SearchResult:
    """Return both results as one; plans of equal decisions are listed once."""
    plans = {plan.decisions: plan for plan in (*more.fitting, *found.fitting)}
    return SearchResult(
        fitting=tuple(sorted(plans.values(), key=lambda plan: plan.rank_key)),
        misfits=tuple(sorted((*found.misfits, *more.misfits), key=lambda misfit: (misfit.bound_s, misfit.peak_bytes))),
        unfit=found.unfit + more.unfit,
        lower_bound_s=min(found.lower_bound_s, more.lower_bound_s),
        open_bound_s=min(found.open_bound_s, more.open_bound_s),
        considered=found.considered + more.considered,
        simulated=found.simulated + more.simulated,
        fitted=found.fitted + more.fitted,
    )
