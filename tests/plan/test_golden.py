"""The golden plans: they parse, print, reload equal, obey all rules, cannot hang, and can be simulated."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.support.golden_plans import GOLDEN, Golden

from pipefit.codec import dump_text, load_text
from pipefit.layout import parse_form, transfer_moves
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.check.rules import check_plan, check_staleness, load_plan, save_plan
from pipefit.plan.explain.text import explain_text
from pipefit.plan.types import InputHashes, Plan
from pipefit.schedule.actions import COMPUTE
from pipefit.schedule.check.deadlock import find_deadlock
from pipefit.simulate import simulate_schedule

HERE = Path(__file__).parent / "golden"


@cache
def golden(name: str) -> Golden:
    return GOLDEN[name]()


@cache
def loaded(name: str) -> Plan:
    if os.environ.get("PIPEFIT_REGENERATE"):
        HERE.mkdir(exist_ok=True)
        save_plan(golden(name).plan, HERE / f"{name}.json")
    return load_plan(HERE / f"{name}.json")


names = pytest.mark.parametrize("name", GOLDEN)


def test_every_file_is_tested() -> None:
    assert {path.stem for path in HERE.glob("*.json")} == set(GOLDEN)


@names
def test_the_file_is_what_is_generated(name: str) -> None:
    assert loaded(name) == golden(name).plan


@names
def test_it_prints_and_reloads_equal(name: str) -> None:
    plan = loaded(name)
    assert load_text(Plan, dump_text(plan), name) == plan
    assert (HERE / f"{name}.json").read_text() == dump_text(plan)
    assert plan.content_hash == load_text(Plan, dump_text(plan), name).content_hash


def test_a_file_of_version_1_means_what_it_meant() -> None:
    old, new = load_plan(HERE.parent / "plan_version_1.json"), loaded("uneven-shards")
    assert (old.version, new.version) == (1, 2)
    assert old.hashes.model == new.hashes.model, "data sheets of its devices have changed since"
    assert replace(old, version=2, hashes=new.hashes) == new
    check_plan(old)


@names
def test_it_obeys_all_rules_for_its_model_and_cluster(name: str) -> None:
    made = golden(name)
    check_plan(loaded(name), made.model, made.cluster)
    check_staleness(loaded(name), made.model, made.cluster)
    assert find_deadlock(loaded(name).order.to_schedule()) is None


@names
def test_it_is_simulated_now(name: str) -> None:
    made, plan = golden(name), loaded(name)
    simulation = simulate_plan(plan, made.model, made.cluster)
    timeline = simulation.timeline
    assert simulation.fits_in_memory
    work = sum(
        simulation.costs.actions[a.kind].cost_of(a.stage, a.microbatch, a.slice).time_s + simulation.costs.overhead_s
        for _, _, a in plan.order.to_schedule()
        if a.kind in COMPUTE
    )
    alone = simulate_schedule(plan.order.to_schedule(), replace(simulation.costs, contention=None))
    assert float(alone.busy_s.sum()) == pytest.approx(work + float(simulation.costs.step_s.sum()))
    assert all(timeline.busy_s >= alone.busy_s * (1 - 1e-9)), "collectives inside actions may have to share their ports"
    assert timeline.makespan_s >= max(timeline.busy_s)
    predicted = add_prediction(plan, made.model, simulation)
    assert "predicted step" in explain_text(predicted) and "stages:" in explain_text(predicted)


@names
def test_without_hashes_it_counts_as_written_by_hand(name: str) -> None:
    made = golden(name)
    plan = replace(loaded(name), hashes=InputHashes(model="", cluster=""))
    check_staleness(plan, made.model, made.cluster)
    check_plan(load_text(Plan, dump_text(plan), name))


def test_the_v_holds_its_first_and_last_stage_on_one_lane() -> None:
    plan = loaded("v-placement")
    assert plan.order.placement == (0, 1, 1, 0)
    assert [stage.group for stage in plan.stages] == [0, 1, 1, 0]
    words = " ".join(plan.order.lanes)
    assert "1SEND_F0" not in words, "stages 1 and 2 are neighbours on one lane: nothing is sent"
    assert "0SEND_F0" in words and "2SEND_F0" in words


def test_slices_are_uneven_and_add_up() -> None:
    plan = loaded("slices")
    assert plan.order.slices == (8, 5, 3) and "0F0/2" in plan.order.lanes[0]


def test_the_tied_tensor_has_two_uses_and_its_own_reduction() -> None:
    plan = loaded("tied-embeddings")
    tied = [parameter for parameter in plan.parameters if len(parameter.uses) > 1]
    assert [(one.name, one.uses, one.owner) for one in tied] == [("embed.weight", (0, 1), 0)]
    assert all(f"{stage}REDUCE:tied.0.1" in lane for stage, lane in enumerate(plan.order.lanes))


def test_the_split_state_is_flat_over_replicas_and_as_stored_over_shards() -> None:
    plan = loaded("split-state")
    forms = {parameter.name: (parameter.stored, parameter.state) for parameter in plan.parameters}
    assert forms["layers.0.up"] == (("I", "G0"), ("Gflat", "G0"))
    assert forms["layers.0.down"] == (("I", "G1"), ("Gflat", "G1"))
    assert forms["embed.weight"] == forms["head.weight"] == (("I", "G0"), ("Gflat", "G0"))
    assert all(f"{stage}GATHER" in lane for stage, lane in enumerate(plan.order.lanes))


def test_three_vision_replicas_feed_two_language_replicas() -> None:
    """4 pictures a microbatch: 2, 1 and 1 on the vision replicas, 2 and 2 on the language ones; checked by hand."""
    plan = loaded("two-modules")
    edge = plan.edges[0]
    source, target = plan.groups[0].to_mesh(), plan.groups[1].to_mesh()
    forms = tuple(map(parse_form, edge.forward.wire))
    found = transfer_moves((4, 4, 8), source, forms, target, forms)
    assert [(move.source, move.target, move.box[0]) for move in found] == [
        (0, 3, (0, 2)),
        (1, 4, (2, 3)),
        (2, 4, (3, 4)),
    ]
    assert {space.name: space.rows for space in plan.spaces} == {"samples": 8, "pictures": 16}


def test_uneven_shares_are_in_the_groups() -> None:
    assert [axis.shares for axis in loaded("uneven-replicas").groups[0].axes] == [(2, 1), (1,)]
    assert [axis.shares for axis in loaded("uneven-shards").groups[0].axes] == [(1,), (3, 1)]
