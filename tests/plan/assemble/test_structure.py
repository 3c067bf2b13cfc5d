"""Assembling plans: random valid decisions give valid plans; wrong ones are told before anything is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plan_toys import seeing_model, toy_cluster, toy_model

from pipefit.codec import dump_text, load_text
from pipefit.errors import PlanError, ScheduleError, StalePlanError
from pipefit.layout import held_box, parse_form
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.check.rules import check_plan, check_staleness
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
from pipefit.schedule.check.deadlock import find_deadlock

CLUSTER = toy_cluster(2, 8)
CONTEXTS = {tied: PlannerContext(toy_model(3, tied=tied), CLUSTER) for tied in (False, True)}
LAYERS = 6

shares = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)


@st.composite
def decisions(draw: st.DrawFn) -> tuple[Job, ParallelConfig]:
    replicas, shards = draw(shares), draw(shares)
    stages = draw(st.integers(1, 4))
    cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), min_size=stages - 1, max_size=stages - 1)))
    microbatches = draw(st.integers(1, 5))
    rows = draw(st.integers(4, 9))
    job = Job(batch=microbatches * rows, sequence=16, precision=draw(st.sampled_from(["float32", "bfloat16"])))
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    placement: tuple[int, ...] = ()
    if stages == 4 and schedule == "gpipe" and draw(st.booleans()):
        placement = (0, 1, 1, 0)
    choice = st.sampled_from(["none", "selective", "full"])
    recompute = draw(st.lists(choice, min_size=stages, max_size=stages)) if draw(st.booleans()) else [draw(choice)]
    return job, ParallelConfig(
        stages=stages,
        cuts=tuple(cuts),
        placement=placement,
        replicas=replicas,
        shards=shards,
        sharding="none" if len(shards) == 1 else draw(st.sampled_from(["megatron", "megatron-sp"])),
        microbatches=microbatches,
        schedule=schedule,
        slices=(9, 7) if len(shards) == 1 and draw(st.booleans()) else (),
        recompute=tuple(recompute),
        sharded_state=draw(st.sampled_from(("none", "optimizer"))),
        inner=draw(st.sampled_from(["replica", "stage"])),
    )


@settings(max_examples=60)
@given(case=decisions(), tied=st.booleans())
def test_valid_decisions_give_valid_plans(case: tuple[Job, ParallelConfig], tied: bool) -> None:
    job, choice = case
    context = CONTEXTS[tied]
    plan = build_plan(context.model, CLUSTER, job, choice, context=context)
    assert load_text(Plan, dump_text(plan), "memory") == plan
    check_plan(plan, context.model, CLUSTER)
    assert find_deadlock(plan.order.to_schedule()) is None
    assert len(plan.used_devices) == choice.device_count
    simulation = simulate_plan(plan, context.model, CLUSTER, programs=context.programs)
    assert simulation.timeline.makespan_s > 0
    final = [
        float(curve.bytes[-1]) - curve.static_bytes for curve in simulation.timeline.lane_memory if len(curve.bytes)
    ]
    assert final == pytest.approx([0.0] * len(final), abs=1e-3), "everything that a step holds is freed in it"


@settings(max_examples=30)
@given(case=decisions())
def test_stored_shards_tile_every_parameter_in_each_replica(case: tuple[Job, ParallelConfig]) -> None:
    job, choice = case
    context = CONTEXTS[False]
    plan = build_plan(context.model, CLUSTER, job, choice, context=context)
    for parameter in plan.parameters:
        group = plan.groups[plan.stages[parameter.owner].group].to_mesh()
        boxes = {held_box(parameter.shape, group, tuple(map(parse_form, parameter.stored)), d) for d in group.devices}
        held = sum((box[0][1] - box[0][0]) * (box[-1][1] - box[-1][0] if len(box) > 1 else 1) for box in boxes)
        whole = parameter.shape[0] * (parameter.shape[1] if len(parameter.shape) > 1 else 1)
        assert held == whole, parameter


def test_replicas_or_stages_lie_next_to_each_other() -> None:
    both = {
        inner: build_plan(
            CONTEXTS[False].model,
            CLUSTER,
            Job(batch=8, sequence=16),
            ParallelConfig(stages=2, replicas=(1, 1), shards=(1, 1), sharding="megatron", inner=inner),  # type: ignore[arg-type]
        )
        for inner in ("replica", "stage")
    }
    assert [group.devices for group in both["replica"].groups] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [group.devices for group in both["stage"].groups] == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_devices_can_be_given() -> None:
    choice = ParallelConfig(stages=2, replicas=(1, 1), devices=(9, 1, 4, 12))
    plan = build_plan(CONTEXTS[False].model, CLUSTER, Job(batch=8, sequence=16), choice)
    assert [group.devices for group in plan.groups] == [(9, 1), (4, 12)]
    assert plan.used_devices == (1, 4, 9, 12)


def test_cuts_follow_the_costs_of_the_layers() -> None:
    """The head is far dearer than a block: with two stages it is not left with half of the layers."""
    model = toy_model(6)
    plan = build_plan(model, CLUSTER, Job(batch=64, sequence=4096), ParallelConfig(stages=2))
    costs = PlannerContext(model, CLUSTER).layer_cutter.cut_layers(
        Job(batch=64, sequence=4096), ParallelConfig(stages=2)
    )
    assert costs is not None
    best = max(f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True))
    for boundary in range(1, 9):
        other = PlannerContext(model, CLUSTER).layer_cutter.cut_layers(
            Job(batch=64, sequence=4096), ParallelConfig(cuts=(boundary,))
        )
        assert other is not None
        assert max(f + b for f, b in zip(other.forward_s, other.backward_s, strict=True)) >= best
    assert plan.stages[1].layers[0] == costs.cuts[0]


def test_building_twice_gives_the_same_plan() -> None:
    choice = ParallelConfig(stages=3, replicas=(1, 1), microbatches=4, sharded_state="optimizer")
    job = Job(batch=16, sequence=16)
    one, two = (build_plan(toy_model(4), toy_cluster(1, 8), job, choice) for _ in range(2))
    assert dump_text(one) == dump_text(two) and one.content_hash == two.content_hash


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "stages": ({"stages": 9}, ["more stages than layers", "1 to 6"]),
    "no stages": ({"stages": 0}, ["above zero", "stages"]),
    "cuts fall": ({"cuts": (3, 2)}, ["cuts must rise", "1 to 5"]),
    "cut outside": ({"cuts": (6,)}, ["cuts must rise"]),
    "shares": ({"replicas": (1, 0)}, ["Shares are positive", "replicas"]),
    "placement": ({"stages": 2, "placement": (0, 2)}, ["names a lane for every stage", "without gaps"]),
    "recompute": ({"stages": 3, "recompute": ("none", "full")}, ["one recompute choice, or one per stage"]),
    "sharding without shards": ({"sharding": "megatron"}, ["More than one shard needs a sharding"]),
    "shards without sharding": ({"shards": (1, 1)}, ["More than one shard needs a sharding"]),
    "devices": ({"stages": 4, "replicas": (1,) * 5}, ["more devices than the cluster has", "5 x 4 x 1 = 20"]),
    "devices twice": ({"stages": 2, "devices": (3, 3)}, ["must be different devices", "2 of 0 to 15"]),
    "batch": ({"microbatches": 3}, ["cannot be cut into this many", "batch 8, microbatches 3", "1, 2, 4, 8"]),
    "rows": ({"microbatches": 8, "replicas": (1, 1)}, ["fewer rows than there are replicas"]),
    "slices": ({"slices": (8, 4)}, ["add up to the sequence", "12 tokens"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_decisions_are_told(name: str) -> None:
    changes, words = WRONG[name]
    with pytest.raises(PlanError) as error:
        build_plan(CONTEXTS[False].model, CLUSTER, Job(batch=8, sequence=16), ParallelConfig(**changes))
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_replica_without_rows_is_told() -> None:
    """2 rows by shares 5 : 1 leave the second replica none."""
    with pytest.raises(PlanError, match="A replica would get no row of a microbatch"):
        build_plan(
            CONTEXTS[False].model, CLUSTER, Job(batch=8, sequence=16), ParallelConfig(replicas=(5, 1), microbatches=4)
        )


def test_an_unknown_schedule_is_told() -> None:
    with pytest.raises(ScheduleError, match="The schedule is unknown"):
        build_plan(CONTEXTS[False].model, CLUSTER, Job(batch=8, sequence=16), ParallelConfig(schedule="zigzag"))


def test_several_modules_are_not_searched_yet() -> None:
    with pytest.raises(PlanError, match="several modules") as error:
        build_plan(seeing_model(), CLUSTER, Job(batch=8, sequence=16), ParallelConfig())
    assert "docs/reference/plan-format.md" in str(error.value)


@pytest.mark.parametrize("changed", ["model", "cluster", "both"])
def test_a_stale_plan_says_what_changed(changed: str) -> None:
    model, cluster = toy_model(3), toy_cluster()
    plan = build_plan(model, cluster, Job(batch=8, sequence=16), ParallelConfig(stages=2))
    check_staleness(plan, model, cluster)
    other: Model = replace(model, config={"layers": 3, "changed": True})
    now = (other if changed != "cluster" else model, toy_cluster(1, 8) if changed != "model" else cluster)
    with pytest.raises(StalePlanError, match="The plan is stale") as error:
        check_staleness(plan, *now)
    text = str(error.value)
    assert ("the model and cluster changed" in text) == (changed == "both")
    assert ("model " + now[0].hash in text) == (changed != "cluster")
    assert "pipefit plan" in text
