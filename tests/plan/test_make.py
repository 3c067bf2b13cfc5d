"""The passes of `plan/make.py`: their order, and that none of them returns a worse result than the one it got."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.plan_toys import toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.errors import DoesNotFitError
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.make import PASSES, make_plan
from pipefit.plan.passes.pass_state import NOTHING_SEARCHED, PassState, SearchRequest
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.types import Job

JOB = Job(batch=12, sequence=64, precision="float32")


def make_request(cluster: str, *fixes: str) -> SearchRequest:
    """Return a request for a toy of six layers."""
    return SearchRequest(PlannerContext(toy_model(6), plain_spec(cluster)), JOB, parse_constraints(fixes), 5)


def test_the_passes_stand_in_one_order() -> None:
    names = [search_pass.__name__ for search_pass in PASSES]
    assert names == ["search_layouts", "split_sequences", "group_state", "place_devices", "group_devices", "trade_time"]


@pytest.mark.parametrize("cluster", ["2xA100-80", "2x1xV100:1Gbit/s"])
def test_no_pass_returns_a_slower_plan_and_the_last_result_is_the_plan(cluster: str) -> None:
    fixes = ("schedule=1f1b", "stages=2")
    request, state, steps = make_request(cluster, *fixes), PassState(NOTHING_SEARCHED), [float("inf")]
    for search_pass in PASSES:
        state = search_pass(request, state)
        steps.append(state.result.fitting[0].step_s)
    assert steps == sorted(steps, reverse=True) and steps[-1] < float("inf")
    plan = make_plan(request.context.model, request.context.cluster, JOB, parse_constraints(fixes))
    assert plan.prediction is not None and plan.prediction.step_s == steps[-1]


def test_the_passes_stop_where_nothing_fits() -> None:
    cluster = plain_spec("2xA100-80")
    small = {name: replace(kind, memory_bytes=10**6) for name, kind in cluster.kinds.items()}
    context = PlannerContext(toy_model(6), replace(cluster, kinds=small))
    request, state = SearchRequest(context, JOB, parse_constraints(["stages=2"]), 5), PassState(NOTHING_SEARCHED)
    with pytest.raises(DoesNotFitError):
        for search_pass in PASSES:
            state = search_pass(request, state)
    assert state.result.misfits and not state.result.fitting, "the error comes after the searches"
