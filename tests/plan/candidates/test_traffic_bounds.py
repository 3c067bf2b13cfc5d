"""Bounds with the collectives of ZeRO-2 and ZeRO-3 rise from level to level, and never exceed the simulated step."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.plan_toys import toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.optimizers.sharded_state import ShardedState
from pipefit.plan.candidates.queue import SearchCandidate, build_queues
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.search import TABLE, LayoutSearch
from pipefit.plan.passes.search_space import list_base_grids
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job
from pipefit.schedule.families import family_facts

JOB = Job(batch=16, sequence=256)
ROUNDING = 1 + 1e-9


def searcher(cluster: str, constraints: Constraints) -> LayoutSearch:
    context = PlannerContext(toy_model(6), plain_spec(cluster))
    return LayoutSearch(context.split_sequences(constraints.context_size), JOB, constraints, 5)


def all_candidates(search: LayoutSearch, *, sliced: bool) -> list[SearchCandidate]:
    grids = list_base_grids(search.context, JOB, search.constraints)
    queues = build_queues(search.floors, search.promising_sliced(grids) if sliced else search.unsliced_grids(grids))
    return [candidate for queue in queues for candidate in _take_all(queue)]


def _take_all(queue: object) -> list[SearchCandidate]:
    taken: list[SearchCandidate] = []
    while not queue.is_empty:  # type: ignore[attr-defined]
        taken += queue.take_next()  # type: ignore[attr-defined]
    return taken


@pytest.mark.parametrize("state", ["gradients", "parameters"])
@pytest.mark.parametrize(
    ("cluster", "constraints"),
    [
        ("2x2xA100-80:10Gbit/s", {}),
        ("2x2xA100-80:400Gbit/s", {}),
        ("2x2xA100-80:10Gbit/s", {"context": 2}),
        ("2x2xA100-80:10Gbit/s", {"slices": 2}),
    ],
)
def test_bounds_rise_to_the_simulated_step(cluster: str, constraints: dict[str, int], state: ShardedState) -> None:
    search = searcher(cluster, Constraints(sharded_state=state, **constraints))  # type: ignore[arg-type]
    candidates = all_candidates(search, sliced="slices" in constraints)
    assert len(candidates) > 30
    simulated = raised = 0
    for candidate in candidates[:: max(1, len(candidates) // 60)]:
        bounds, count = [candidate.bound_s], len(search.fitting)
        again: float | None = candidate.bound_s
        while again is not None:
            again = search.raise_level(candidate, again)
            if again is not None and not candidate.leaner:
                assert again >= bounds[-1]
                bounds.append(again)
        if len(search.fitting) > count:
            step_s = min(plan.step_s for plan in search.fitting if plan.decisions == candidate.decisions)
            assert max(bounds) <= step_s * ROUNDING
            simulated, raised = simulated + 1, raised + (bounds[1] > bounds[0] * ROUNDING)
    assert simulated > 20 and raised


@pytest.mark.parametrize("state", ["gradients", "parameters"])
def test_grids_are_bounded_with_their_collectives(state: ShardedState) -> None:
    """On slow links the bound of a grid rises with the replicas that share collectives; without any it stays."""
    search = searcher("2x2xA100-80:1Gbit/s", Constraints(sharded_state=state))
    risen = 0
    for places, floor in search.floors.bound_batches(
        search.unsliced_grids(list_base_grids(search.context, JOB, search.constraints))
    ):
        plain_s, with_state_s = search.floors.bound_s(floor), search.floors.state_bounds_s(floor)
        assert len(places) == len(with_state_s) and (with_state_s >= plain_s[..., None, None]).all()
        replicas = np.array([grid.replica_count for grid in floor.grids])
        rises = (with_state_s > plain_s[..., None, None] * ROUNDING).any(axis=(1, 2, 3, 4))
        assert not rises[replicas == 1].any()
        risen += int(rises.sum())
    assert risen > 3


@pytest.mark.parametrize("state", ["gradients", "parameters"])
def test_times_of_stages_are_those_of_the_cost_table(state: ShardedState) -> None:
    search = searcher("2x2xA100-80:10Gbit/s", Constraints(sharded_state=state, slices=1))
    compared = 0
    for candidate in all_candidates(search, sliced=False)[::7]:
        again: float | None = candidate.bound_s
        while again is not None and candidate.level < TABLE:
            again = search.raise_level(candidate, again)
        if again is None or candidate.costs is None:
            continue
        cut = search.context.layer_cutter.leanest_cut(JOB, candidate.decisions)
        forward_s, backward_s = search.floors.traffic.stage_times_s(candidate.decisions, cut)
        actions = {kind: table.time_s[:, 0, 0] for kind, table in candidate.costs.actions.items()}
        wanted_s = actions["B"]
        if not family_facts(candidate.decisions.schedule).fused:
            wanted_s = np.minimum(wanted_s, actions["I"] + actions["W"])
        np.testing.assert_allclose(forward_s, actions["F"], rtol=1e-12)
        np.testing.assert_allclose(backward_s, wanted_s, rtol=1e-12)
        compared += 1
    assert compared > 10
