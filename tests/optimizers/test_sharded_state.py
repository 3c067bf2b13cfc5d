"""One field says what the replicas shard; plan files and constraints of before keep their meaning and hash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.codec import dump_text, load_text
from pipefit.errors import PlanError
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.constraints import Constraints, parse_constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan


def plan_of(**decisions: Any) -> Plan:
    job = Job(batch=8, sequence=64)
    return build_plan(toy_model(4), toy_cluster(), job, ParallelConfig(replicas=(1, 1), microbatches=2, **decisions))


@pytest.mark.parametrize("text", ["sharded_state=optimizer", "zero1=true"])
def test_both_spellings_constrain_the_field(text: str) -> None:
    assert parse_constraints([text]) == Constraints(sharded_state="optimizer")
    with pytest.raises(PlanError, match=r"fixed twice|different values"):
        parse_constraints([text, "zero1=false"])


@pytest.mark.parametrize("state", ["gradients", "parameters"])
def test_what_is_not_implemented_is_refused(state: Any) -> None:
    with pytest.raises(PlanError) as error:
        parse_constraints([f"sharded_state={state}"])
    text = error.value.full_text()
    assert f"Replicas cannot shard {state} yet" in text and "none, optimizer" in text and "ZeRO-1" in text
    with pytest.raises(PlanError, match=f"cannot shard {state} yet"):
        plan_of(sharded_state=state)


@pytest.mark.parametrize(
    ("text", "message", "allowed"),
    [
        ("sharded_state=all", "not a kind of sharded state", "none, optimizer"),
        ("zero1=maybe", "not a valid value", "true is optimizer, false is none"),
    ],
)
def test_an_unknown_state_is_refused(text: str, message: str, allowed: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_constraints([text])
    assert message in error.value.full_text() and allowed in error.value.full_text()


@pytest.mark.parametrize(("state", "word"), [("none", "false"), ("optimizer", "true")])
def test_plan_files_keep_their_form(state: Any, word: str) -> None:
    plan = plan_of(sharded_state=state)
    assert plan.decisions["sharded_state"] == state
    data = json.loads(dump_text(plan))
    assert data["decisions"]["zero1"] == word and "sharded_state" not in data["decisions"]
    again = load_text(Plan, dump_text(plan), "plan")
    assert again == plan and again.content_hash == plan.content_hash
    assert any("Gflat" in parameter.state for parameter in plan.parameters) == (state == "optimizer")
