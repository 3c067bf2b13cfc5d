"""Inputs and results of the passes: what every pass gets, and the search result that it hands to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.split_sequences import fix_context
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job, TradePoint


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The inputs of every pass."""

    context: PlannerContext
    job: Job
    constraints: Constraints
    "Choices that the user fixed, and a sharding that follows from them."
    top: int
    tolerance: float = 0.0
    "Fraction by which the simplest plan may be slower than the fastest."

    def hold_context(self, plans: Sequence[EvaluatedPlan]) -> SearchRequest:
        """Return the request with the context axis of the first of these plans, if any."""
        if not plans:
            return self
        parts = plans[0].decisions.context
        self.context.split_sequences(parts)
        return replace(self, constraints=fix_context(self.constraints, parts))


@dataclass(frozen=True, slots=True)
class PassState:
    """The search result after a pass, with the notes and points that passes add."""

    result: SearchResult
    placement_note: str = ""
    group_note: str = ""
    trade: tuple[TradePoint, ...] = ()
    interrupted: bool = False

    @property
    def searched_notes(self) -> tuple[str, ...]:
        """The notes of the searches for devices and groups, which are about the fastest plan."""
        return tuple(filter(None, (self.placement_note, self.group_note)))


NOTHING_SEARCHED = SearchResult(
    fitting=(),
    misfits=(),
    unfit=0,
    lower_bound_s=float("inf"),
    open_bound_s=float("inf"),
    considered=0,
    simulated=0,
)

SearchPass = Callable[[SearchRequest, PassState], PassState]
