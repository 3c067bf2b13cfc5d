"""The search for groups that shard state: never slower than a pinned size, only where replicas span hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.plan.passes.test_search import CLUSTERS, everything
from tests.support.plan_toys import toy_cluster, toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.plan.candidates.grid import broadcast_cells
from pipefit.plan.candidates.space import iter_grids
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.explain.text import alternative_table
from pipefit.plan.make import make_plan
from pipefit.plan.passes.fitted_orders import best_plans
from pipefit.plan.passes.group_state import STATE_GROUP_BUDGET, search_state_groups
from pipefit.plan.passes.search import LayoutSearch, search_plans
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job

JOB = Job(batch=64, sequence=64)


def small_memory(spec: str, beyond: int) -> Cluster:
    """Devices with the workspace and `beyond` bytes more."""
    cluster = plain_spec(spec)
    kinds = {name: replace(kind, memory_bytes=WORKSPACE_BYTES + beyond) for name, kind in cluster.kinds.items()}
    return replace(cluster, kinds=kinds)


SLOW_NETWORK = ("2x4xA100-80:100MB/s", 600_000)
"""Fast links inside hosts, slow ones between them, and memory for sharded state only."""


def fastest_plan(cluster: Cluster, size: int | None, job: Job = JOB) -> EvaluatedPlan | None:
    """The fastest plan of a group size, or of all sizes."""
    context, constraints = PlannerContext(toy_model(4), cluster), Constraints(state_group=size)
    result = search_state_groups(context, job, constraints, best_plans(context, job, constraints))
    return next(iter(result.fitting), None)


PINNED: dict[str, tuple[str, int, Job]] = {
    "slow network": (*SLOW_NETWORK, JOB),
    "hosts of two devices": ("2x2xA100-80:10MB/s", 300_000, JOB),
    "little memory": ("2x2xA100-80:10MB/s", 100_000, replace(JOB, sequence=16)),
    "plenty of memory": ("2x4xA100-80:1GB/s", 60_000_000, replace(JOB, batch=16, sequence=512)),
}


@pytest.mark.parametrize("case", PINNED)
def test_no_pinned_size_is_faster_than_the_free_plan(case: str) -> None:
    spec, beyond, job = PINNED[case]
    cluster = small_memory(spec, beyond)
    free = fastest_plan(cluster, None, job)
    assert free is not None
    sizes = [size for size in (0, 2, 4) if 2 * size <= sum(host.devices for host in cluster.hosts)]
    pinned = {size: fastest_plan(cluster, size, job) for size in sizes}
    for size, plan in pinned.items():
        assert plan is None or plan.step_s > 0.995 * free.step_s, (size, plan.decisions)
    whole = pinned[0]
    assert whole is not None and not whole.decisions.hybrid_group
    if case == "slow network":
        assert free.decisions.hybrid_group in (2, 4) and free.decisions.sharded_state != "none"
        assert whole.step_s > 1.02 * free.step_s, "groups gain something"
        hosts = [device // 4 for device in free.decisions.lane_devices()[0]]
        assert len({*hosts}) == 2, "the replicas span the hosts"


def test_later_passes_keep_the_groups() -> None:
    """The memory curve and the better clusters are of plans with groups; alternatives are of all sizes."""
    plan = make_plan(toy_model(4), small_memory(*SLOW_NETWORK), JOB, tolerance=0.0)
    assert plan.prediction is not None and int(plan.decisions["state_group"]) > 1
    assert all(stage.state_group == int(plan.decisions["state_group"]) for stage in plan.stages)
    chosen = [point for point in plan.prediction.trade if point.chosen]
    assert [point.step_s for point in chosen] == [pytest.approx(plan.prediction.step_s)]
    for change in plan.prediction.sensitivity:
        assert change.step_s <= plan.prediction.step_s * (1 + 1e-9)
    assert any("state_group" not in alternative.decisions for alternative in plan.alternatives)
    table = alternative_table(plan)
    rows = [row[: table.columns.index("step")] for row in table.rows]
    assert len({*rows}) == len(rows), "no two rows show the same choices"


def searched(cluster: Cluster, constraints: Constraints = NO_CONSTRAINTS) -> tuple[PlannerContext, SearchResult]:
    context = PlannerContext(toy_model(4), cluster)
    return context, search_plans(context, JOB, constraints)


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(state_group=0),
        Constraints(sharded_state="none"),
        Constraints(slices=2),
        Constraints(groups=True),
        Constraints(mapping=(*range(8),)),
        Constraints(replicas=(1,)),
        Constraints(devices=4),
    ],
)
def test_pins_exclude_groups(constraints: Constraints) -> None:
    context, found = searched(small_memory(*SLOW_NETWORK), replace(constraints, mapping=None, slices=None, groups=None))
    assert search_state_groups(context, JOB, constraints, found) is found


@pytest.mark.parametrize("cluster", [toy_cluster(), plain_spec("8x1xA100-80:1GB/s"), CLUSTERS["mixed"]()])
def test_one_host_single_devices_and_unlike_hosts_are_not_tried(cluster: Cluster) -> None:
    context, found = searched(cluster, Constraints(sharded_state="optimizer", recompute=("none",)))
    assert search_state_groups(context, JOB, NO_CONSTRAINTS, found) is found


def test_a_plan_at_the_lower_bound_is_not_challenged() -> None:
    context, found = searched(small_memory(*SLOW_NETWORK))
    assert search_state_groups(context, JOB, NO_CONSTRAINTS, found) is not found
    least = found.fitting[0].step_s / (1 + STATE_GROUP_BUDGET.worthwhile / 2)
    near = replace(found, lower_bound_s=least)
    assert search_state_groups(context, JOB, NO_CONSTRAINTS, near) is near


def test_a_result_without_a_winning_group_is_unchanged() -> None:
    """Plans and their alternatives change only where groups win."""
    context, found = searched(plain_spec("2x4xA100-80:1GB/s"))
    assert search_state_groups(context, JOB, NO_CONSTRAINTS, found) is found


NARROW: dict[str, Any] = {"recompute": ("none",), "sharding": "none"}


@pytest.mark.parametrize(
    "cluster", [toy_cluster(2, 4), plain_spec("2x2xA100-80:10MB/s"), small_memory("4xA100-80", 4_000_000)]
)
def test_the_search_of_a_pinned_size_finds_the_best_plan(cluster: Cluster) -> None:
    constraints, job = Constraints(state_group=2, schedule="1f1b", slices=1, **NARROW), Job(batch=8, sequence=512)
    context = PlannerContext(toy_model(3), cluster)
    plans = [plan for plan in everything(context, job, constraints) if plan.simulation.fits_in_memory]
    assert plans and {plan.decisions.state_group for plan in plans} == {2}
    best = search_plans(context, job, constraints).fitting[0]
    assert best.step_s == pytest.approx(min(plan.step_s for plan in plans), rel=1e-9)


def test_bounds_of_pinned_sizes_never_exceed_the_simulation() -> None:
    context, job = PlannerContext(toy_model(3), plain_spec("2x2xA100-80:10MB/s")), Job(batch=8, sequence=512)
    constraints = Constraints(state_group=2, slices=1, schedule="1f1b", **NARROW)
    searcher = LayoutSearch(context, job, constraints, 5)
    checked = 0
    for grid in iter_grids(job, 5, 4, 2, constraints, context.layer_cutter):
        bounds = broadcast_cells(searcher.floors.bound_s(searcher.floors.bound_grid(grid))[0], grid)
        for index, bound_s in enumerate(bounds.tolist()):
            decisions = grid.decisions_at(index)
            assert isinstance(decisions, ParallelConfig)
            plan = evaluate_candidate(context, decisions, context.make_skeleton(job, decisions))
            assert bound_s <= plan.step_s * (1 + 1e-9)
            checked += 1
    assert checked > 5
