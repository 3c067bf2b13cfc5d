"""The simplest of about equally fast plans: the stated order, the tolerance, and plans of a whole search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import pytest
from tests.support.plan_toys import toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.errors import PlanError
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.simplicity import (
    TOLERANCE,
    choose_simplest,
    less_simple_by,
    parse_tolerance,
    plan_simplicity,
)
from pipefit.plan.explain.text import forecast_lines
from pipefit.plan.make import iter_passes, make_plan, prepare_request
from pipefit.plan.passes.memory_trade import trade_memory
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan

JOB = Job(batch=12, sequence=64, precision="float32")
PIPELINE = ParallelConfig(stages=2, microbatches=4)


@dataclass(frozen=True)
class TimedPlan:
    """Only the figures of an evaluated plan."""

    decisions: ParallelConfig
    step_s: float = 1.0
    peak_bytes: float = 50.0
    limit_bytes: float = 100.0

    @property
    def rank_key(self) -> tuple[float, float]:
        return self.step_s, self.peak_bytes


def timed(decisions: ParallelConfig = PIPELINE, **figures: float) -> EvaluatedPlan:
    return cast(EvaluatedPlan, TimedPlan(decisions, **figures))


SIMPLER_FIRST = {
    "token slices": (
        timed(replace(PIPELINE, schedule="fit", replicas=(2, 1)), peak_bytes=90.0),
        timed(replace(PIPELINE, slices=(32, 32))),
    ),
    "a fitted order": (timed(replace(PIPELINE, replicas=(2, 1))), timed(replace(PIPELINE, schedule="fit"))),
    "uneven shares or groups": (
        timed(replace(PIPELINE, replicas=(1, 1), shards=(1, 1), sharding="megatron"), peak_bytes=90.0),
        timed(replace(PIPELINE, replicas=(2, 1))),
    ),
    "more parallel axes": (timed(peak_bytes=90.0), timed(replace(PIPELINE, replicas=(1, 1)))),
    "more memory": (timed(), timed(replace(PIPELINE, microbatches=2), peak_bytes=51.5)),
}
"""Feature -> (the simpler plan, the plan with the feature). In features of a later line the first plan is worse."""


@pytest.mark.parametrize("feature", SIMPLER_FIRST)
def test_the_first_feature_that_differs_decides(feature: str) -> None:
    simple, clever = SIMPLER_FIRST[feature]
    slower = cast(EvaluatedPlan, replace(cast(TimedPlan, simple), step_s=1.009))
    for plans in ([clever, slower], [slower, clever]):
        assert choose_simplest(plans, 0.01) is slower
        assert choose_simplest(plans, 0.008) is clever, "beyond the tolerance"
        assert choose_simplest(plans, 0.0) is clever
        assert choose_simplest(plans, 0.01, fastest_s=0.99) is clever, "a plan of another list is faster"
    assert less_simple_by(clever, simple) == feature and less_simple_by(simple, clever) == ""


def test_equally_simple_plans_are_chosen_by_time() -> None:
    fast, slow = timed(peak_bytes=50.9), timed(step_s=1.005, peak_bytes=50.1)
    assert plan_simplicity(fast) == plan_simplicity(slow), "less than one per cent of the memory"
    assert choose_simplest([slow, fast], 0.01) is fast


def test_one_slice_is_no_slice_and_equal_groups_are_even() -> None:
    assert not plan_simplicity(timed(replace(PIPELINE, slices=(64,)))).sliced
    assert not plan_simplicity(timed(replace(PIPELINE, replicas=(2, 2)))).uneven
    groups = replace(PIPELINE, shards=(1, 1), sharding="searched", lane_shards=((1, 1), (1,)))
    assert plan_simplicity(timed(groups)).uneven


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), ("0.02", 0.02), ("1%", 0.01), (" 2.5 % ", 0.025)])
def test_tolerances_are_fractions_or_percentages(text: str, value: float) -> None:
    assert parse_tolerance(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["1", "-0.1", "60%", "some", "", "%", "nan"])
def test_bad_tolerances_name_the_allowed_ones(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_tolerance(text)
    for word in ("not a valid tolerance", "--tolerance", repr(text), "such as 0.01", "1%", "0 is the fastest"):
        assert word in str(caught.value)


@cache
def plan_of(cluster: str, fixes: str, tolerance: float, top: int = 5) -> Plan:
    return make_plan(
        toy_model(6), plain_spec(cluster), JOB, parse_constraints(fixes.split()), tolerance=tolerance, top=top
    )


def step_of(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


@pytest.mark.parametrize("top", [5, 2])
def test_the_fastest_plan_is_named_and_listed_beside_the_simpler_one(top: int) -> None:
    fastest, simple = (plan_of("2xA100-80", "stages=2", tolerance, top) for tolerance in (0.0, 0.2))
    assert (fastest.decisions["schedule"], simple.decisions["schedule"]) == ("fit", "zb-h2")
    assert step_of(fastest) < step_of(simple) <= 1.2 * step_of(fastest)
    [note] = [line for line in forecast_lines(simple) if line.startswith("tolerance: ")]
    assert "20.0 us (4.83%) less, with a fitted order: 1 replicas x 2 stages" in note and "--tolerance 0" in note
    first = simple.alternatives[0]
    assert first.step_s == step_of(fastest) and first.decisions == fastest.decisions
    assert first.reason == "fitted order: 4.83% faster (20.0 us), but less simple: a fitted order"
    assert not any("tolerance" in line for line in forecast_lines(fastest))
    assert simple.prediction is not None
    assert [point.step_s for point in simple.prediction.trade if point.chosen] == [step_of(simple)]
    assert simple.prediction.lower_bound_s == fastest.prediction.lower_bound_s  # type: ignore[union-attr]


def test_the_result_is_the_simplest_of_all_plans_that_were_simulated() -> None:
    context = PlannerContext(toy_model(6), plain_spec("3xA100-80"))
    request = prepare_request(
        context, replace(JOB, sequence=512), parse_constraints(["groups=false", "stages=3"]), tolerance=0.2
    )
    *_, state = iter_passes(request)
    chosen = state.result.fitting[0]
    assert len(state.result.fitting) > 5
    assert choose_simplest(state.result.fitting, 0.2) is chosen
    assert min(plan.step_s for plan in state.result.fitting) < chosen.step_s


def test_the_trade_of_memory_keeps_a_simpler_order() -> None:
    """With the same layout, a fitted order of the curve is faster than the family that was chosen."""
    context = PlannerContext(toy_model(6), plain_spec("2xA100-80"))
    *_, state = iter_passes(prepare_request(context, JOB, parse_constraints(["stages=2"]), tolerance=0.2))
    best, constraints = state.result.fitting[0], parse_constraints(["stages=2"])
    assert best.decisions.schedule != "fit"
    by_time = trade_memory(context, JOB, constraints, best)
    simplest = trade_memory(context, JOB, constraints, best, 0.2)
    assert by_time.best is by_time.fastest and by_time.best.decisions.schedule == "fit"
    assert simplest.best.decisions.schedule != "fit" and simplest.fastest.step_s == by_time.fastest.step_s


def test_the_default_is_one_per_cent() -> None:
    assert TOLERANCE == 0.01
    with pytest.raises(PlanError, match="not a valid tolerance"):
        make_plan(toy_model(6), plain_spec("2xA100-80"), JOB, tolerance=0.7)
