"""One field says what the replicas shard; plan files and constraints of before keep their meaning and hash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.codec import dump_text, load_text
from pipefit.errors import PlanError
from pipefit.optimizers.sharded_state import (
    STATES,
    STATES_UP_TO_ZERO_1,
    ShardedState,
    leanest_state,
    searched_states,
    state_choices,
)
from pipefit.plan.assemble.pipeline_work import skeleton_from_plan
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
def test_a_plan_names_what_is_sharded_in_the_form_of_the_state(state: ShardedState) -> None:
    plan = plan_of(sharded_state=parse_constraints([f"sharded_state={state}"]).sharded_state)
    again = load_text(Plan, dump_text(plan), "plan")
    assert again == plan and again.decisions["sharded_state"] == state
    assert {parameter.state[0] for parameter in again.parameters} == {f"Gflat:{state}"}
    assert set(skeleton_from_plan(again).sharded_state) == {state}
    gathers = [action for _, _, action in again.to_schedule() if action.kind == "GATHER"]
    assert bool(gathers) == (state == "gradients"), "sharded parameters are gathered for use, not after the update"


def test_parameters_of_several_layers_shard_only_the_optimizer_state() -> None:
    job = Job(batch=8, sequence=64)
    decisions = ParallelConfig(replicas=(1, 1), microbatches=2, sharded_state="parameters")
    plan = build_plan(toy_model(4, tied=True), toy_cluster(), job, decisions)
    uses = {name for layer in toy_model(4, tied=True).modules[0].layers for name in layer.parameters.values()}
    forms = {parameter.name: parameter.state[0] for parameter in plan.parameters}
    assert forms.keys() == uses
    assert [name for name, form in forms.items() if form == "Gflat"] == ["embed.weight"]


def test_a_search_tries_what_is_asked_for_or_everything() -> None:
    assert state_choices(None, 4) == ("none", "optimizer", "gradients", "parameters")
    assert state_choices(None, 1) == ("none",)
    assert state_choices(None, 4, searched_states(unlike_devices=False)) == STATES
    assert state_choices(None, 4, searched_states(unlike_devices=True)) == STATES_UP_TO_ZERO_1
    assert state_choices("parameters", 4) == ("parameters",)
    assert (leanest_state(None), leanest_state("gradients")) == ("parameters", "gradients")
    assert leanest_state(None, STATES_UP_TO_ZERO_1) == "optimizer"


@pytest.mark.parametrize(
    ("text", "message", "allowed"),
    [
        ("sharded_state=all", "not a kind of sharded state", "none, optimizer, gradients, parameters"),
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
