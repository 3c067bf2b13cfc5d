"""A search for any plan that fits: the leanest candidates first."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from pipefit.cost.work import COMPLETE_STATE
from pipefit.plan.candidates.closest_misfit import least_missing_bytes
from pipefit.plan.candidates.grid import CandidateGrid
from pipefit.plan.candidates.queue import SearchCandidate, leanest_first
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.search import LayoutSearch
from pipefit.plan.passes.search_space import list_base_grids
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job


def some_plan_fits(context: PlannerContext, job: Job, constraints: Constraints) -> bool:
    """Return whether `search_plans` would find a plan.

    It tries the leanest candidates first, until one fits or the budget of simulations is spent. Raises PlanError as
    `search_plans` does.
    """
    if not _state_fits(context, job):
        return False
    searcher = LayoutSearch(context, job, constraints, 1)
    space = list_base_grids(context, job, constraints)
    _find_any_fit(searcher, searcher.unsliced_grids(space))
    if not searcher.fitting:
        _find_any_fit(searcher, searcher.promising_sliced(space))
    return bool(searcher.fitting)


def _state_fits(context: PlannerContext, job: Job) -> bool:
    """Return whether all devices together hold one copy of the parameters, gradients and optimizer state."""
    needed = float(context.layer_cutter.layer_static_bytes(job, COMPLETE_STATE).sum())
    return needed <= fsum(float(kind.memory_bytes) for kind in context.network.kinds)


def _find_any_fit(searcher: LayoutSearch, space: Sequence[CandidateGrid]) -> None:
    """Look for any plan that fits: the leanest candidates first, within the budget."""
    for decisions in leanest_first(searcher.floors, space):
        if least_missing_bytes(searcher.context.layer_cutter, searcher.job, decisions) > 0:
            continue
        candidate = SearchCandidate(decisions)
        while searcher.raise_level(candidate, 0.0) is not None:
            pass
        if (
            searcher.fitting
            or searcher.simulated >= searcher.budget.feasibility_simulations
            or searcher.spent > searcher.budget.infeasible_actions
        ):
            return
