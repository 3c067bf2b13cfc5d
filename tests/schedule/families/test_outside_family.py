"""A schedule family from outside the package, added by the public hook alone: planned, simulated, drawn and run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans
from tests.support.plan_toys import toy_cluster, toy_model
from tests.testing.outside_family import BREADTH_FIRST, looped_stages
from typer.testing import CliRunner

from pipefit.cli import build_app
from pipefit.errors import PlanError
from pipefit.plan.check.rules import check_plan
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.passes.search import search_plans
from pipefit.plan.request.constraints import Constraints, parse_constraints
from pipefit.plan.types import Job
from pipefit.show.page import render_report
from pipefit.show.subject import make_subject
from pipefit.testing import temporary_family

JOB = Job(batch=2, sequence=65536)
LONG_JOB = Job(batch=2, sequence=2**20)
TWO_LANES = Constraints(devices=2, replicas=(1,), recompute=("none",), placement=looped_stages(2))
"""Three stages on each of two lanes, a placement that GPipe and interleaved 1F1B also take."""


@pytest.fixture
def family() -> Iterator[str]:
    with temporary_family(BREADTH_FIRST):
        yield BREADTH_FIRST.name


def test_it_is_planned_on_request(family: str) -> None:
    model, cluster = toy_model(9), toy_cluster()
    constraints = parse_constraints([f"schedule={family}", "devices=2", "replicas=1", "shards=1"])
    best = search_plans(PlannerContext(model, cluster), JOB, constraints, top=1).fitting[0]
    assert best.decisions.schedule == family and best.decisions.lane_of_stage == looped_stages(2)
    plan = build_plan(model, cluster, JOB, best.decisions)
    check_plan(plan)
    assert plan.order.name == family
    page = render_report(make_subject(plan, model=model, cluster=cluster))
    assert family in page


def test_it_wins_the_search_unasked() -> None:
    def fastest() -> tuple[str, float]:
        best = search_plans(PlannerContext(toy_model(45), toy_cluster()), LONG_JOB, TWO_LANES, top=1).fitting[0]
        return best.decisions.schedule, best.step_s

    name_before, before_s = fastest()
    with temporary_family(BREADTH_FIRST):
        name, step_s = fastest()
    assert (name_before, name) == ("gpipe", BREADTH_FIRST.name) and step_s < before_s
    assert fastest() == (name_before, before_s), "nothing of the family is left"


def test_it_is_drawn(family: str) -> None:
    done = CliRunner().invoke(build_app(), ["schedule", family, "--devices", "2", "--microbatches", "2", "--grid"])
    assert done.exit_code == 0, done.output
    assert "0F0 0F1 2F0 2F1 4F0 4F1" in done.output


def test_without_registration_it_is_unknown() -> None:
    with pytest.raises(PlanError, match=r"(?s)not a valid value for 'schedule'.*allowed: 1f1b, 1f1b-v, dualpipe-v"):
        parse_constraints([f"schedule={BREADTH_FIRST.name}"])


@pytest.mark.gloo
def test_it_trains_as_one_process_does(gloo_pool, family: str) -> None:
    plan = plans.plan("llama", stages=6, placement=looped_stages(2), schedule=family, microbatches=4)
    check_plan(plan)
    assert plan.order.name == family
    gloo_pool.run(cases.prepare, [(plan, plans.model("llama"))], ranks=gloo_pool.size)
    result = gloo_pool.run(cases.run_steps, plan, plans.model("llama"), plans.VOCABULARY, ranks=2)[0]
    loss, gradients = plans.reference("llama", plans.JOB)
    assert result["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    assert set(result["gradients"]) == set(gradients)
    for parameter, gradient in gradients.items():
        expected = gradient.numpy()
        assert np.abs(result["gradients"][parameter] - expected).max() <= 1e-10 * np.abs(expected).max(), parameter
