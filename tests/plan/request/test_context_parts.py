"""What cannot split its sequences over devices is refused, by `plan`, for plans by hand, and before a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.plan.request.test_sliceable import model as named_model
from tests.support.plan_toys import WIDTH, block_graph, toy_cluster, toy_model

from pipefit.cluster import local_cluster
from pipefit.errors import PlanError
from pipefit.layout import zigzag_runs
from pipefit.model.graph import TensorSpec
from pipefit.plan.check.rules import check_plan, load_plan, plan_problems, save_plan
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.explain.text import explain_text
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.context_parts import context_obstacles
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import AxisPlan, Job, Plan
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.worker.build import build_worker

JOB = Job(batch=8, sequence=16)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_have_equal_work_and_cover_the_sequence(parts: int) -> None:
    length = 12 * parts
    runs = zigzag_runs(length, parts)
    tokens = [[*range(*first), *range(*last)] for first, last in runs]
    assert sorted(token for part in tokens for token in part) == [*range(length)]
    assert len({sum(token + 1 for token in part) for part in tokens}) == 1, "pairs of a token and an earlier one"
    with pytest.raises(PlanError, match="does not divide"):
        zigzag_runs(length + 1, parts)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"context": 3}, {}, ["equal parts", "16 tokens in 6 chunks", "multiple of 6", "--seq 12"]),
    ({"context": 2, "slices": (8, 8)}, {}, ["token slices", "2 parts and 2 slices", "slices=1"]),
    ({"context": 2}, {"documents": "apart"}, ["Documents cannot be kept apart", "--documents joined"]),
    ({"context": 2, "shards": (1, 1), "sharding": "searched"}, {}, ["Searched shard programs", "megatron-sp"]),
    ({"context": 8, "replicas": (1, 1)}, {}, ["more devices", "replicas x stages x context x shards", "= 16"]),
    ({"context": 0}, {}, ["above zero"]),
    ({"context": 2, "stages": 2, "devices": (1, 0, 2, 3)}, {}, ["rising order", "--fix mapping", "seen: 1, 0"]),
    ({"context": 4, "shards": (1,) * 5, "sharding": "megatron-sp"}, {}, ["more devices"]),
]


@pytest.mark.parametrize(("fields", "job", "told"), REFUSED)
def test_decisions_are_refused(fields: dict[str, Any], job: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(PlanError) as refused:
        build_plan(toy_model(4), toy_cluster(), replace(JOB, **job), ParallelConfig(**fields))
    assert all(part in str(refused.value) for part in told), str(refused.value)


@pytest.mark.parametrize(
    ("fields", "job", "told"), [case for case in REFUSED if case[0]["context"] in (2, 3) and "devices" not in case[0]]
)
def test_constraints_are_refused(fields: dict[str, Any], job: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(PlanError) as refused:
        make_plan(toy_model(4), toy_cluster(), replace(JOB, **job), Constraints(**fields))
    assert all(part in str(refused.value) for part in told[:-1]), str(refused.value)
    assert "--fix context" in str(refused.value)


OPAQUE = {
    "products": "matmul of every token with every other",
    "undeclared": "opaque",
    "dropped": "inner.1: Dropout",
    "convolved": "mix: Conv1d",
}


@pytest.mark.parametrize("name", OPAQUE)
def test_a_layer_that_may_mix_tokens_is_named(name: str) -> None:
    with pytest.raises(PlanError) as refused:
        build_plan(named_model(name), local_cluster(2), JOB, ParallelConfig(context=2))
    text = str(refused.value)
    assert "mixes tokens outside of attention, or may do so" in text and OPAQUE[name] in text and "layers.1" in text
    build_plan(named_model(name), local_cluster(2), JOB, ParallelConfig())


def test_a_model_captured_as_one_graph_is_refused() -> None:
    """Its sequence length is fixed; so the samples of a user's data set are never split."""
    block = replace(block_graph(), inputs=(TensorSpec(name="x", shape=("B", 16, WIDTH)),))
    model = toy_model(2)
    fixed = replace(model, graphs={**model.graphs, "block": block})
    error = next(context_obstacles(fixed, "context"))
    assert "may do so" in error.what and "x ('B', 16, 8)" in str(error.seen)


def test_attention_may_see_later_tokens() -> None:
    assert not [*context_obstacles(named_model("bidirectional"), "context")]
    assert not [*context_obstacles(named_model("tokenwise"), "context")]


def test_models_of_several_modules_are_refused() -> None:
    model = toy_model(2)
    several = replace(model, modules=(model.modules[0], replace(model.modules[0], name="vision")))
    (error,) = context_obstacles(several, "context")
    assert "several modules" in error.what and error.seen == "language, vision"


def by_hand(model_name: str) -> Plan:
    """A plan for a model whose layers do not allow it, made for another model of equal layers."""
    plan = build_plan(named_model(model_name), local_cluster(2), JOB, ParallelConfig(replicas=(1, 1)))
    (group,) = plan.groups
    axes = (AxisPlan(name="context", shares=(1, 1)), AxisPlan(name="shard", shares=(1,)))
    return replace(plan, groups=(replace(group, axes=axes),))


def test_a_plan_by_hand_is_refused_before_a_run() -> None:
    plan = by_hand("undeclared")
    check_plan(plan)
    assert any("may do so" in error.what for error in plan_problems(plan, named_model("undeclared")))
    with pytest.raises(PlanError, match="may do so"):
        build_worker(plan, named_model("undeclared"), CommGroups(), torch.device("cpu"), OptimizerConfig())


def test_the_context_axes_of_a_plan_are_even_and_equal() -> None:
    plan = by_hand("tokenwise")
    (group,) = plan.groups
    uneven = replace(group, axes=(AxisPlan(name="context", shares=(2, 1)), group.axes[1]))
    with pytest.raises(PlanError, match="are equal"):
        check_plan(replace(plan, groups=(uneven,)))
    staged = build_plan(toy_model(4), toy_cluster(), JOB, ParallelConfig(stages=2, context=2))
    first, last = staged.groups
    unlike = replace(
        last,
        axes=tuple(
            replace(axis, name="replica") if axis.name == "context" else axis
            for axis in last.axes
            if axis.name != "replica"
        ),
    )
    with pytest.raises(PlanError, match="same number of parts"):
        check_plan(replace(staged, groups=(first, unlike)))
    turned = replace(first, devices=first.devices[::-1])
    with pytest.raises(PlanError, match="rising order"):
        check_plan(replace(staged, groups=(turned, last)))
    with pytest.raises(PlanError, match="token slices"):
        check_plan(replace(staged, order=replace(staged.order, slices=(8, 8))))


def test_a_search_keeps_the_fixed_axis(tmp_path) -> None:
    plan = make_plan(toy_model(4), toy_cluster(2), JOB, Constraints(context=2))
    assert {group.to_mesh().find_axis("context").size for group in plan.groups} == {2}
    assert plan.decisions["context"] == "2" and plan.decisions.get("slices") is None
    assert all(row.decisions["context"] == "2" for row in plan.alternatives)
    text = explain_text(plan)
    assert "2 parts of sequences" in text and "slices: not used: sequences are split over devices" in text
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    check_plan(plan, toy_model(4), toy_cluster(2))


def test_other_plans_do_not_mention_it() -> None:
    plan = build_plan(toy_model(4), toy_cluster(), JOB, ParallelConfig(stages=2))
    assert "context" not in plan.decisions and [axis.name for axis in plan.groups[0].axes] == ["replica", "shard"]


def test_one_context_of_the_planner_serves_several_sizes() -> None:
    model, cluster = toy_model(4), toy_cluster()
    context = PlannerContext(model, cluster)
    for parts in (1, 2, 4, 1):
        config = ParallelConfig(context=parts)
        plan = build_plan(model, cluster, JOB, config, context=context)
        assert plan == build_plan(model, cluster, JOB, config)
