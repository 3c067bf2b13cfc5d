"""The search for plans that split sequences over devices: never slower than a pinned size, only where it may gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.passes.test_search import CLUSTERS
from tests.support.plan_toys import toy_cluster, toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.model.registry import open_model
from pipefit.plan.evaluate.outcome import SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.explain.text import alternative_table
from pipefit.plan.make import iter_passes, make_plan, prepare_request
from pipefit.plan.passes.pass_state import PassState
from pipefit.plan.passes.search import search_plans
from pipefit.plan.passes.split_sequences import SPLITTING_BUDGET, search_contexts
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.types import Job

LONG = Job(batch=2, sequence=32768, precision="bfloat16")
CLUSTER = plain_spec("4xH100")


def last_state(constraints: Constraints, job: Job = LONG, name: str = "llama-3.2-1b") -> PassState:
    *_, state = iter_passes(prepare_request(PlannerContext(open_model(name), CLUSTER), job, constraints))
    return state


def test_few_long_sequences_are_split_and_no_pinned_size_is_faster() -> None:
    free = last_state(NO_CONSTRAINTS).result.fitting
    pinned = {parts: last_state(Constraints(context=parts)).result.fitting[0].step_s for parts in (1, 2, 4)}
    assert free[0].decisions.context == min(pinned, key=lambda parts: pinned[parts]) == 2
    assert free[0].step_s == pytest.approx(min(pinned.values()), rel=1e-12)
    assert pinned[1] > 1.01 * pinned[2], "splitting gains something"
    steps = [plan.step_s for plan in free]
    assert steps == sorted(steps) and {plan.decisions.context for plan in free} >= {1, 2}


def test_later_passes_keep_the_axis() -> None:
    """The memory curve and the better clusters are of plans with the same axis; alternatives are of all sizes."""
    plan = make_plan(open_model("llama-3.2-1b"), CLUSTER, LONG, tolerance=0.0)
    assert plan.prediction is not None and plan.decisions["context"] == "2"
    chosen = [point for point in plan.prediction.trade if point.chosen]
    assert [point.step_s for point in chosen] == [pytest.approx(plan.prediction.step_s)]
    for change in plan.prediction.sensitivity:
        assert change.step_s <= plan.prediction.step_s * (1 + 1e-9)
    assert any("context" not in alternative.decisions for alternative in plan.alternatives)
    table = alternative_table(plan)
    assert table.rows[0][table.columns.index("context")] == "2"
    rows = [row[: table.columns.index("step")] for row in table.rows]
    assert len({*rows}) == len(rows), "no two rows show the same choices"


JOB = Job(batch=2, sequence=4096)


def searched(constraints: Constraints = NO_CONSTRAINTS, job: Job = JOB) -> tuple[PlannerContext, SearchResult]:
    context = PlannerContext(toy_model(2), toy_cluster())
    return context, search_plans(context, job, constraints)


def test_the_toy_is_tried_with_every_size() -> None:
    """The pins below exclude the axis of a request that has it otherwise."""
    context, found = searched()
    more = search_contexts(context, JOB, NO_CONSTRAINTS, found)
    assert more.considered > found.considered
    assert context.context_parts == more.fitting[0].decisions.context


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(context=1),
        Constraints(context=2),
        Constraints(slices=2),
        Constraints(shards=(1, 1), sharding="searched"),
        Constraints(groups=True),
        Constraints(mapping=(0, 1, 2, 3)),
        Constraints(devices=1),
    ],
)
def test_pins_exclude_the_axis(constraints: Constraints) -> None:
    context, found = searched()
    assert search_contexts(context, JOB, constraints, found) is found
    assert context.context_parts == (constraints.context or 1)


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, sequence=4 * SPLITTING_BUDGET.least_chunk - 4),
        replace(JOB, sequence=4097),
        replace(JOB, documents="apart"),
    ],
)
def test_short_odd_and_packed_sequences_are_not_split(job: Job) -> None:
    context, found = searched(job=replace(job, documents="joined"))
    assert search_contexts(context, job, NO_CONSTRAINTS, found) is found


def test_a_plan_at_the_lower_bound_is_not_challenged() -> None:
    context, found = searched()
    least = found.fitting[0].step_s / (1 + SPLITTING_BUDGET.worthwhile / 2)
    near = replace(found, lower_bound_s=least)
    assert search_contexts(context, JOB, NO_CONSTRAINTS, near) is near


def test_unlike_devices_are_not_tried() -> None:
    context = PlannerContext(toy_model(2), CLUSTERS["mixed"]())
    found = search_plans(context, JOB)
    assert search_contexts(context, JOB, NO_CONSTRAINTS, found) is found
