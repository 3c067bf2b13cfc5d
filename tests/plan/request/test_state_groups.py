"""Groups that shard state together: what is refused, what plan files hold, and how plans show the groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.plan_toys import toy_cluster, toy_model
from tests.support.three_modules import three_modules

from pipefit.cluster import parse_spec
from pipefit.codec import dump_text
from pipefit.errors import PlanError
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.check.rules import check_plan, load_plan, plan_problems, save_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.explain.text import alternative_table, choice_cells, choice_keys, decision_table, explain_text
from pipefit.plan.explain.why_not import parse_layout
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import Constraints, describe_choices, parse_constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan

JOB = Job(batch=8, sequence=16)
FOUR: dict[str, Any] = {"replicas": (1,) * 4, "microbatches": 2, "sharded_state": "parameters"}


def make(**decisions: Any) -> Plan:
    return build_plan(toy_model(4), toy_cluster(), JOB, ParallelConfig(**(FOUR | decisions)))


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"state_group": 3}, ["cannot be divided", "groups of 3 for 4 replicas", "2, 4", "state_group=2"]),
    ({"state_group": 8}, ["groups of 8 for 4 replicas", "2, 4", "state_group=4"]),
    ({"state_group": 1}, ["groups of 1 for 4 replicas", "2, 4"]),
    ({"state_group": 3, "replicas": (1, 1), "context": 2}, ["2 replicas x 2 parts of sequences", "2, 4"]),
    ({"state_group": 2, "replicas": (1,)}, ["1 replica\n", "single member"]),
    ({"state_group": 2, "sharded_state": "none"}, ["no state is sharded", "gradients or parameters"]),
    ({"state_group": 2, "replicas": (2, 1, 1)}, ["equal shares", "replicas 2:1:1, groups of 2", "replicas=3"]),
]


@pytest.mark.parametrize(("fields", "told"), REFUSED)
def test_decisions_are_refused(fields: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(PlanError) as refused:
        make(**fields)
    assert all(part in str(refused.value) for part in told), str(refused.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("hsdp=1", ["not a valid value for 'hsdp'", "state_group"]),
        ("state_group=none", ["not a valid value for 'state_group'", "or all"]),
        ("hsdp=3 dp=8", ["--fix state_group", "groups of 3 for 8 replicas", "2, 4, 8"]),
        ("state_group=2 zero=0", ["no state is sharded", "leave out state_group"]),
        ("state_group=2 dp=2:1", ["equal shares", "state_group=all"]),
        ("hsdp=2 zero=1", ["different values", "hsdp=2 and zero=1"]),
    ],
)
def test_fixes_are_refused(words: str, told: list[str]) -> None:
    with pytest.raises(PlanError) as refused:
        parse_constraints(words.split())
    assert all(part in str(refused.value) for part in told), str(refused.value)


def test_names_of_the_field() -> None:
    assert parse_constraints(["hsdp=8"]) == Constraints(state_group=8, sharded_state="parameters")
    assert parse_constraints(["hsdp=8", "dp=2", "cp=4"]).context == 4
    assert parse_constraints(["state_group=all"]).state_group == 0
    assert parse_layout("hsdp=2 dp=4", 8) == Constraints(
        state_group=2, sharded_state="parameters", replicas=(1, 1, 1, 1)
    )


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (3, ["2 groups of 3, 4 replicas at most", "at most 2; or replicas=3", "state_group=2"]),
        (8, ["2 groups of 8", "at most 2\n", "state_group=2"]),
    ],
)
def test_too_few_devices_for_several_groups_are_refused_with_the_nearest(size: int, told: list[str]) -> None:
    with pytest.raises(PlanError, match="Several groups") as refused:
        make_plan(toy_model(4), toy_cluster(), JOB, Constraints(state_group=size))
    assert all(part in str(refused.value) for part in told), str(refused.value)


def test_a_size_that_no_layout_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="No plan obeys") as refused:
        make_plan(toy_model(4), parse_spec("8xA100-80"), JOB, Constraints(state_group=3))
    assert "state_group=2" in str(refused.value)
    with pytest.raises(PlanError, match="No plan obeys") as refused:
        make_plan(toy_model(4), parse_spec("8xA100-80"), replace(JOB, batch=3), Constraints(state_group=2))
    assert "state_group=1" not in str(refused.value), "a group of one is none"


def test_one_group_of_all_is_the_plan_without_groups(tmp_path: Path) -> None:
    plain, whole = make(), make(state_group=4)
    assert plain.content_hash == whole.content_hash
    assert "state_group" not in dump_text(whole)
    pinned = make_plan(toy_model(4), toy_cluster(), JOB, parse_constraints(["dp=4", "hsdp=4"]))
    free = make_plan(toy_model(4), toy_cluster(), JOB, parse_constraints(["dp=4", "zero=3", "state_group=all"]))
    assert pinned.decisions == free.decisions


def test_a_plan_with_groups_is_kept_in_its_file(tmp_path: Path) -> None:
    plan = make(state_group=2, stages=1)
    save_plan(plan, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan and [stage.state_group for stage in again.stages] == [2]
    assert plan.decisions["state_group"] == "2"
    check_plan(again, toy_model(4), toy_cluster())
    assert simulate_plan(again, toy_model(4), toy_cluster()).timeline.makespan_s > 0


@pytest.mark.parametrize(
    ("size", "state", "told"),
    [(3, "parameters", "cannot be divided"), (5, "optimizer", "cannot be divided"), (2, "none", "no state is sharded")],
)
def test_a_plan_by_hand_is_checked(size: int, state: str, told: str) -> None:
    plan = make(sharded_state=state)
    plan = replace(plan, stages=tuple(replace(stage, state_group=size) for stage in plan.stages))
    problems = [str(problem) for problem in plan_problems(plan)]
    assert any(told in problem and "stages[0].state_group" in problem for problem in problems), problems


def test_models_of_several_modules_have_no_groups() -> None:
    with pytest.raises(PlanError, match="several modules") as refused:
        make_plan(three_modules(), parse_spec("8xH100"), JOB, Constraints(state_group=2))
    assert "state_group" in str(refused.value)


def test_plans_show_their_groups() -> None:
    constraints = parse_constraints(["dp=4", "state_group=2", "zero=2"])
    plan = make_plan(toy_model(4), toy_cluster(), JOB, constraints)
    assert plan.decisions["state_group"] == "2" and ("state_group", "2") in decision_table(plan).rows
    assert "state_group" in alternative_table(plan).columns and "state_group" in explain_text(plan)
    config = ParallelConfig(**FOUR, state_group=2)
    assert describe_choices(config).endswith("sharded state parameters in groups of 2")
    assert describe_choices(replace(config, state_group=4)).endswith("sharded state parameters")
    keys = choice_keys(plan.decisions, make().decisions)
    assert choice_cells(make().decisions, keys)[-1] == "all" and choice_cells(plan.decisions, keys)[-1] == "2"


@pytest.mark.parametrize("cluster", ["4xA100-80", "2x4xH100:10GB/s"])
@pytest.mark.parametrize("state", ["optimizer", None])
def test_the_search_obeys_the_size(cluster: str, state: Any) -> None:
    plan = make_plan(
        toy_model(4), parse_spec(cluster), replace(JOB, sequence=256), Constraints(state_group=2, sharded_state=state)
    )
    assert {stage.state_group for stage in plan.stages} == {2}
    assert plan.decisions.get("zero1") != "false" and plan.decisions.get("sharded_state", "") != "none"
