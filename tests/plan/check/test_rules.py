"""Every rule of a plan, broken once: the message names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.changes import Change, put
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.codec import from_data, to_data
from pipefit.errors import PipefitError, PlanError
from pipefit.plan.check.rules import check_plan, load_plan, plan_problems
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan

MODEL = toy_model(2, tied=True)
CLUSTER = toy_cluster(1, 8)
PLAN = build_plan(
    MODEL,
    CLUSTER,
    Job(batch=8, sequence=16),
    ParallelConfig(
        stages=2,
        cuts=(2,),
        replicas=(1, 1),
        shards=(1, 1),
        sharding="megatron",
        microbatches=4,
        sharded_state="optimizer",
    ),
)


def words(lane: int, old: str, new: str) -> Change:
    def change(data: dict[str, Any]) -> None:
        text = data["order"]["lanes"][lane]
        assert old in text, (old, text)
        data["order"]["lanes"][lane] = text.replace(old, new)

    return change


BREAKS: dict[str, tuple[Change, list[str]]] = {
    "version": (put("version", value=7), ["version of the plan format", "seen: 7"]),
    "batch": (put("job", "batch", value=0), ["above zero", "job.batch"]),
    "axis twice": (put("groups", 0, "axes", 1, "name", value="replica"), ["named twice", "groups[0].axes"]),
    "share of nothing": (put("groups", 0, "axes", 0, "shares", value=[1, 0]), ["Shares are positive", "(replica)"]),
    "grid and devices": (put("groups", 0, "devices", value=[0, 1, 2]), ["do not match", "groups[0].devices", "2 x 2"]),
    "a device twice": (put("groups", 0, "devices", value=[0, 0, 2, 3]), ["different", "groups[0].devices"]),
    "groups overlap": (put("groups", 1, "devices", value=[3, 4, 5, 6]), ["share some of their devices", "device 3"]),
    "space without rows": (put("spaces", 0, "rows", value=0), ["at least one row", "samples"]),
    "layers left out": (put("stages", 1, "layers", value=[3, 5]), ["exactly one stage", "starts at layer 2"]),
    "layers twice": (put("stages", 1, "layers", value=[1, 5]), ["exactly one stage", "stages[1].layers"]),
    "no such group": (put("stages", 0, "group", value=4), ["no such group", "stages[0].group", "0 to 1"]),
    "no such space": (put("stages", 0, "space", value="tiles"), ["no such space", "samples"]),
    "sharding": (put("stages", 0, "sharding", value="none"), ["sharded exactly when", "stages[0].sharding"]),
    "multiple": (put("stages", 0, "microbatch_multiple", value=0), ["above zero", "stages[0].microbatch_multiple"]),
    "unused group": (put("stages", 1, "group", value=0), ["no stage uses", "groups[1]"]),
    "edge backwards": (put("edges", 0, "target", value=0), ["to a later one", "edges[0]"]),
    "no edge": (put("edges", value=[]), ["need an edge", "none from stage 0 to 1"]),
    "forms of an edge": (
        put("edges", 0, "forward", "sent", value=["G0"]),
        ["for each axis", "forward.sent", "replica"],
    ),
    "no form": (put("edges", 0, "gradient", "wire", value=["G0", "X"]), ["not a form", "gradient.wire", "'X'"]),
    "partial to whole": (
        put("edges", 0, "gradient", "received", value=["G0", "I"]),
        ["Partial sums can only move", "edges[0].gradient.wire", "reduced before"],
    ),
    "becoming partial": (
        put("edges", 0, "forward", "wire", value=["G0", "P"]),
        ["cannot turn a tensor into partial", "edges[0].forward.wire"],
    ),
    "duality": (
        put("edges", 0, "gradient", value={k: ["G0", "I"] for k in ("sent", "wire", "received")}),
        ["does not follow from the tensor's form", "I for a tensor that is I", "allowed: P"],
    ),
    "parameter twice": (put("parameters", 1, "name", value="embed.weight"), ["is listed twice", "embed.weight"]),
    "no uses": (put("parameters", 0, "uses", value=[]), ["rising numbers of stages", "(embed.weight).uses"]),
    "uses beyond": (put("parameters", 0, "uses", value=[0, 2]), ["rising numbers", "0 to 1"]),
    "owner": (put("parameters", 1, "owner", value=1), ["owner must be one of the stages", "(layers.0.up).owner"]),
    "stored partial": (put("parameters", 0, "stored", value=["P", "I"]), ["stored replicated, or split", "P of shape"]),
    "stored beyond": (
        put("parameters", 0, "stored", value=["I", "G2"]),
        ["stored replicated, or split", "G2 of shape (64, 8)"],
    ),
    "stored flat": (put("parameters", 0, "stored", value=["Gflat", "I"]), ["stored replicated", "Gflat only in"]),
    "state": (
        put("parameters", 1, "state", value=["G1", "G0"]),
        ["state has the parameter's form", "(layers.0.up).state", "I or Gflat"],
    ),
    "forms of a state": (put("parameters", 1, "state", value=["I"]), ["for each axis of the owner", ".state"]),
    "placement short": (put("order", "placement", value=[0]), ["a lane for every stage", "order.placement"]),
    "placement gap": (put("order", "placement", value=[0, 2]), ["without gaps", "order.placement"]),
    "microbatches": (put("order", "microbatches", value=3), ["equal microbatches", "batch 8, microbatches 3"]),
    "rows": (put("spaces", 0, "rows", value=4), ["no row of a microbatch", "stages[0]"]),
    "rows do not divide": (put("spaces", 0, "rows", value=7), ["rows of the stage's space", "7 rows, 4 microbatches"]),
    "slices": (put("order", "slices", value=[8, 9]), ["add up to the sequence", "17 tokens"]),
    "no slice": (put("order", "slices", value=[]), ["One slice is the whole sequence", "[16]"]),
    "no action": (words(0, "0F0 ", "0Q0 "), ["not an action", "'0Q0'"]),
    "left out": (words(0, "0F3 ", ""), ["0F3"]),
    "wrong lane": (words(0, "0F3 ", "0F3 1F3 "), ["1F3"]),
    "not received": (words(1, "1RECV_F2 ", ""), ["1RECV_F2"]),
    "no reduction": (words(0, " 0REDUCE ", " "), ["lack an action", "no 0REDUCE"]),
    "no tied reduction": (words(1, " 1REDUCE:tied.0.1", ""), ["lack an action", "1REDUCE:tied.0.1"]),
    "no gather": (words(1, " 1GATHER", ""), ["lack an action", "no 1GATHER"]),
}


@pytest.mark.parametrize("name", BREAKS)
def test_every_break_is_named(name: str) -> None:
    change, expected = BREAKS[name]
    data = json.loads(json.dumps(to_data(PLAN)))
    change(data)
    plan = from_data(Plan, data, "plan.json")
    with pytest.raises(PipefitError) as error:
        check_plan(plan)
    for word in expected:
        assert word in str(error.value), str(error.value)


def test_a_valid_plan_has_no_problems() -> None:
    assert list(plan_problems(PLAN, MODEL, CLUSTER)) == []


def test_a_schedule_that_would_hang_is_refused_with_a_drawing() -> None:
    """Both lanes wait for the other's message first."""
    data = json.loads(json.dumps(to_data(PLAN)))
    first = data["order"]["lanes"][0]
    data["order"]["lanes"][0] = first.replace("0F0 0SEND_F0 0F1 0SEND_F1", "0F0 0F1 0SEND_F1 0SEND_F0")
    assert data["order"]["lanes"][0] != first
    with pytest.raises(PipefitError) as error:
        check_plan(from_data(Plan, data, "plan.json"))
    assert "0SEND_F1" in str(error.value)


def test_one_lane_needs_one_set_of_devices() -> None:
    data = json.loads(json.dumps(to_data(PLAN)))
    data["order"]["placement"] = [0, 0]
    data["order"]["lanes"] = data["order"]["lanes"][:1]
    with pytest.raises(PlanError, match="held by the same devices"):
        check_plan(from_data(Plan, data, "plan.json"))


def test_only_computed_lanes_are_not_enough() -> None:
    data = json.loads(json.dumps(to_data(PLAN)))
    data["order"]["lanes"] = ["0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
    with pytest.raises(PlanError, match="lanes of a plan are lowered"):
        check_plan(from_data(Plan, data, "plan.json"))


def test_another_model_is_told_by_layers_and_by_parameters() -> None:
    with pytest.raises(PlanError, match="do not cover the layers of the model") as error:
        check_plan(PLAN, toy_model(3, tied=True))
    assert "6 layers" in str(error.value)
    with pytest.raises(PlanError, match="parameters are not the model's") as error:
        check_plan(PLAN, toy_model(2))
    assert "head.weight" in str(error.value)


def test_a_smaller_cluster_is_told() -> None:
    with pytest.raises(PlanError, match="no such device") as error:
        check_plan(PLAN, MODEL, toy_cluster(1, 4))
    assert "groups[1].devices (language)" in str(error.value) and "0 to 3" in str(error.value)
    assert "pipefit plan" in str(error.value.next_step)


def test_loading_checks(tmp_path: Path) -> None:
    data = json.loads(json.dumps(to_data(PLAN)))
    BREAKS["owner"][0](data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="owner must be one"):
        load_plan(path)
