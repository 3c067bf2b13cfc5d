"""The search for plans with a context axis: every sequence is split over neighbouring devices.

It follows the search of all other layouts, and its candidates have to beat the plans of that search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce

from pipefit.errors import PlanError
from pipefit.plan.evaluate.outcome import SearchResult, merge_results
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.fitted_orders import best_plans
from pipefit.plan.passes.search import LayoutSearch
from pipefit.plan.passes.search_budget import SearchBudget
from pipefit.plan.passes.search_space import list_base_grids
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.context_parts import CONTEXT, context_obstacles
from pipefit.plan.types import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class SplittingBudget:
    """Limits of the search for plans with a context axis."""

    least_chunk: int = 256
    "Tokens of a chunk: a device holds two chunks of each sequence, and computes shorter ones less efficiently."
    worthwhile: float = 0.005
    "A best plan that is above the lower bound by at most this fraction is not challenged."
    search: SearchBudget = field(default_factory=lambda: SearchBudget(alternative_simulations=8))
    "Work for each size of the axis."


SPLITTING_BUDGET = SplittingBudget()


def search_contexts(
    context: PlannerContext, job: Job, constraints: Constraints, found: SearchResult, top: int = 5
) -> SearchResult:
    """Return the search result with the plans of all sizes of the context axis that were tried.

    Nothing is tried if the size is fixed, if the model or the constraints exclude the axis, on unlike devices, or if
    the best plan is near the lower bound. If a size wins, its plans get better cuts and fitted orders, like all other
    layouts. The planner context is left at the best size.
    """
    tried: dict[int, SearchResult] = {}
    best = found
    for parts in _context_sizes(context, job, constraints) if found.leaves_to_gain(SPLITTING_BUDGET.worthwhile) else ():
        try:
            tried[parts] = _search_size(context, job, fix_context(constraints, parts), best, top)
        except PlanError:
            continue
        best = merge_results(best, tried[parts])
        if not best.leaves_to_gain(SPLITTING_BUDGET.worthwhile):
            break
    parts = _best_size(best)
    context.split_sequences(constraints.context or parts)
    if parts in tried:
        of_size = [plan for plan in tried[parts].fitting if plan.decisions.context == parts]
        first = replace(tried[parts], fitting=tuple(of_size))
        exact = best_plans(context, job, fix_context(constraints, parts), top, first=first)
        tried[parts] = replace(exact, fitting=(*exact.fitting, *tried[parts].fitting))
    return reduce(merge_results, tried.values(), found)


def fix_context(constraints: Constraints, parts: int) -> Constraints:
    """Return the constraints with a context axis of this size."""
    return replace(constraints, context=parts).with_context_defaults if parts > 1 else constraints


def _context_sizes(context: PlannerContext, job: Job, constraints: Constraints) -> Iterator[int]:
    """Yield the sizes to try, the smallest first."""
    network = context.network
    if constraints.context is not None or constraints.groups or isinstance(constraints.mapping, tuple):
        return
    if constraints.sharding == "searched" or constraints.slices not in (None, 1) or job.documents == "apart":
        return
    if context.layer_cutter.fleet.is_mixed or any(context_obstacles(context.model, CONTEXT)):
        return
    limit = min(constraints.devices or network.devices, network.devices)
    parts = 2
    while parts <= limit and job.sequence >= 2 * parts * SPLITTING_BUDGET.least_chunk:
        if limit % parts == 0 and job.sequence % (2 * parts) == 0:
            yield parts
        parts *= 2


def _best_size(found: SearchResult) -> int:
    return found.fitting[0].decisions.context if found.fitting else 1


def _search_size(context: PlannerContext, job: Job, held: Constraints, found: SearchResult, top: int) -> SearchResult:
    """Return the search for one size of the axis. Its candidates have to beat the plans so far."""
    searcher = LayoutSearch(context.split_sequences(held.context_size), job, held, top, SPLITTING_BUDGET.search)
    searcher.fitting += found.fitting
    return searcher.run(list_base_grids(context, job, searcher.constraints))
