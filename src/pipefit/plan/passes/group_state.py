"""The search for plans whose sharded state is split within hosts and replicated between hosts (HSDP).

It follows the searches of all other layouts, and its candidates have to beat their plans. The replicas that shard the
state together are on one host, all of them there or an equal part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from pipefit.cluster.topology import has_alike_hosts
from pipefit.errors import PlanError
from pipefit.optimizers.sharded_state import shards_optimizer
from pipefit.plan.candidates.grid import CandidateGrid
from pipefit.plan.evaluate.outcome import SearchResult, merge_results
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.fitted_orders import best_plans
from pipefit.plan.passes.search import LayoutSearch
from pipefit.plan.passes.search_budget import SearchBudget
from pipefit.plan.passes.search_space import list_base_grids
from pipefit.plan.passes.split_sequences import fix_context
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.expert_parts import splits_rows
from pipefit.plan.types import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroupBudget:
    """Limits of the search for groups that shard state."""

    worthwhile: float = 0.005
    "A best plan that is above the lower bound by at most this fraction is not challenged."
    grids: int = 24
    "Grids of candidates, those with the smallest estimated step."
    search: SearchBudget = field(
        default_factory=lambda: SearchBudget(order_actions=25_000, alternative_simulations=0, infeasible_actions=50_000)
    )
    "Work on their candidates."


STATE_GROUP_BUDGET = StateGroupBudget()


def search_state_groups(
    context: PlannerContext, job: Job, constraints: Constraints, found: SearchResult, top: int = 5
) -> SearchResult:
    """Return the search result, with the plans of the best group size if a plan with groups is the fastest.

    Nothing is tried if the size is fixed, if no state may be sharded, on a single host, on unlike hosts, or if the best
    plan is near the lower bound. If a size wins, it is searched again like all other layouts, with fitted orders.
    """
    if not _groups_apply(context, constraints) or not found.leaves_to_gain(STATE_GROUP_BUDGET.worthwhile):
        return found
    held = fix_context(constraints, context.context_parts)
    searcher = LayoutSearch(context, job, held.with_defaults(slices=1), top, STATE_GROUP_BUDGET.search)
    searcher.fitting += found.fitting
    grids = _promising_grids(searcher, list_base_grids(context, job, held))
    if not grids:
        return found
    try:
        best = searcher.run(grids).fitting[:1]
    except PlanError:
        return found
    if not best or not best[0].decisions.hybrid_group:
        return found
    grouped = replace(held, state_group=best[0].decisions.hybrid_group)
    exact = best_plans(context, job, grouped, top)
    return merge_results(found, replace(exact, fitting=(*best, *exact.fitting)))


def _groups_apply(context: PlannerContext, constraints: Constraints) -> bool:
    """Return whether the constraints leave room for groups, and the cluster has several equal hosts."""
    state = constraints.sharded_state
    if constraints.state_group is not None or constraints.groups or (state is not None and not shards_optimizer(state)):
        return False
    if isinstance(constraints.mapping, tuple) or constraints.slices not in (None, 1):
        return False
    hosts = context.cluster.hosts
    return len(hosts) > 1 and hosts[0].devices > 1 and has_alike_hosts(context.cluster)


def _promising_grids(searcher: LayoutSearch, space: list[CandidateGrid]) -> list[CandidateGrid]:
    """Return the grids with groups whose estimated step is below the best plan, those with the smallest ones."""
    ungrouped = searcher.unsliced_grids(space)
    grouped = [grid for plain in ungrouped for grid in _with_groups(plain, searcher.context)]
    best_s = searcher.fitting[0].step_s if searcher.fitting else float("inf")
    estimated: list[tuple[float, int]] = []
    for places, floor in searcher.floors.bound_batches(grouped):
        estimates = searcher.floors.guesses_s(floor).min(axis=(1, 2, 3, 4, 5))
        estimated += zip(estimates.tolist(), places, strict=True)
    ranked = sorted(pair for pair in estimated if pair[0] < best_s)
    return [grouped[index] for _, index in ranked[: STATE_GROUP_BUDGET.grids]]


def _with_groups(plain: CandidateGrid, context: PlannerContext) -> Iterator[CandidateGrid]:
    """Yield the grid with groups of every size that divides the replicas on a host, for each rank order in which they
    span several hosts. Expert parallelism shards state over all devices of a stage."""
    states = tuple(filter(shards_optimizer, plain.sharded_state))
    even = tuple(count for count in plain.counts if len({*count[1]}) == 1)
    divides_rows = splits_rows(plain.sharding) or plain.expert > 1
    for inner in plain.inner if states and even and not divides_rows else ():
        grid = replace(plain, inner=(inner,), counts=even, sharded_state=states)
        members = _members_in_host(grid, context)
        for size in range(2, members + 1):
            if members % size == 0:
                yield replace(grid, state_group=size)


def _members_in_host(grid: CandidateGrid, context: PlannerContext) -> int:
    """Return the number of replicas (times parts of sequences) of a stage that each of its hosts holds; 0 if hosts
    differ, or hold one or all of them."""
    members = np.array(grid.decisions_at(0).lane_devices())[:, :: len(grid.shards)]
    hosts = np.array(context.network.host)[members]
    size = int((hosts[0] == hosts[0, 0]).sum())
    if size == hosts.shape[1] or hosts.shape[1] % size:
        return 0
    groups = hosts.reshape(len(hosts), -1, size)
    return size if bool((groups == groups[:, :, :1]).all()) else 0
