"""The plan against its own trade curve and against schedule families: nothing that fits and is allowed is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.passes.test_search import little_memory
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.cluster import open_cluster
from pipefit.cluster.types import Cluster
from pipefit.model.graph import Model
from pipefit.model.registry import open_model
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job, Plan

MID = Job(batch=16, sequence=512, precision="bfloat16")
LONG = Job(batch=16, sequence=8192, precision="bfloat16")


def assert_fastest_of_its_curve(plan: Plan) -> None:
    assert plan.prediction is not None
    points = plan.prediction.trade
    limit = min(lane.limit_bytes for lane in plan.prediction.lanes)
    fitting = [one.step_s for one in points if one.memory_bytes <= limit]
    assert len(fitting) > 1
    assert plan.prediction.step_s <= min(fitting) * (1 + 1e-9)
    assert [one.step_s for one in points if one.chosen] == [plan.prediction.step_s]


@pytest.mark.parametrize("beyond", [400_000, 3_000_000, 6_000_000])
@pytest.mark.parametrize("count", [3, 4])
def test_no_point_of_the_curve_that_fits_is_faster(beyond: int, count: int) -> None:
    plan = make_plan(toy_model(8), little_memory(count, beyond=beyond), MID, Constraints(replicas=(1,)), tolerance=0)
    assert_fastest_of_its_curve(plan)


@pytest.fixture(scope="module")
def large() -> tuple[Model, Cluster]:
    pytest.importorskip("torch")
    return open_model("llama-3-8b"), open_cluster("8xA100-40")


@pytest.fixture(scope="module")
def family(large: tuple[Model, Cluster]) -> Plan:
    return make_plan(
        *large,
        LONG,
        Constraints(schedule="interleaved-1f1b", replicas=(1, 1), microbatches=8, shards=(1,), context=1),
        tolerance=0,
    )


def test_a_faster_fitted_order_of_the_curve_is_the_plan(large: tuple[Model, Cluster], family: Plan) -> None:
    """Of pipelines with two replicas interleaved 1F1B wins the search; an order fitted to what its layout has left is
    quicker by more than 1 %."""
    plan = make_plan(*large, LONG, Constraints(shards=(1,), context=1), tolerance=0)
    assert_fastest_of_its_curve(plan)
    assert plan.prediction is not None and family.prediction is not None
    assert plan.decisions["schedule"] == "fit"
    assert plan.prediction.step_s < 0.99 * family.prediction.step_s
    assert "a fitted order takes" in plan.prediction.assumptions[-1]


def test_a_pinned_fit_is_not_slower_than_the_best_plan_of_the_families(
    large: tuple[Model, Cluster], family: Plan
) -> None:
    """Its layers are cut again as those of families are."""
    pins = Constraints(schedule="fit", replicas=(1, 1), microbatches=8, shards=(1,), context=1)
    fitted = make_plan(*large, LONG, pins, tolerance=0)
    assert_fastest_of_its_curve(fitted)
    assert fitted.prediction is not None and family.prediction is not None
    assert fitted.prediction.step_s <= family.prediction.step_s * (1 + 1e-9)


def test_a_pinned_fit_tries_every_placement() -> None:
    """Four stages on two devices: the V's families have better orders than the loop's."""
    model, cluster = open_model("tiny"), toy_cluster(1, 2)
    job = Job(batch=8, sequence=64)
    constraints = Constraints(replicas=(1,), stages=4, microbatches=4)
    fitted = make_plan(model, cluster, job, replace(constraints, schedule="fit"), tolerance=0)
    assert_fastest_of_its_curve(fitted)
    assert fitted.prediction is not None
    for name in ("v-half", "zb-v", "v-min", "interleaved-1f1b"):
        other = make_plan(model, cluster, job, replace(constraints, schedule=name), tolerance=0)
        assert other.prediction is not None
        assert fitted.prediction.step_s <= other.prediction.step_s * (1 + 1e-9), name


def test_a_pinned_fit_lists_every_choice_once_and_claims_no_gain() -> None:
    plan = make_plan(open_model("tiny"), open_cluster("4xA100-40"), MID, Constraints(schedule="fit"), tolerance=0)
    assert plan.prediction is not None and plan.alternatives
    rows = [dict(plan.decisions), *(dict(one.decisions) for one in plan.alternatives)]
    for row in rows:
        row.pop("cuts", None)
    assert all(row not in rows[:index] for index, row in enumerate(rows))
    assert not any("as fast, listed later" in one.reason for one in plan.alternatives)
    assert "fitted order" not in plan.prediction.assumptions[-1]
