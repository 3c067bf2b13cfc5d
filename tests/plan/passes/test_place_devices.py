"""The placement search inside the planner: only where links differ, what it gains, and how it is pinned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.placement_toys import skewed_cluster
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.cluster import Cluster
from pipefit.errors import PlanError
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.check.rules import check_plan
from pipefit.plan.explain.text import explain_text
from pipefit.plan.make import make_plan
from pipefit.plan.passes import place_devices as in_planner
from pipefit.plan.request.constraints import Constraints, parse_constraints
from pipefit.plan.types import Job, Plan

JOB = Job(batch=16, sequence=128)
PIPELINE = Constraints(stages=4, replicas=(1, 1), schedule="1f1b", microbatches=8)


def planned(cluster: Cluster, **constraints: Any) -> Plan:
    return make_plan(toy_model(6), cluster, JOB, replace(PIPELINE, **constraints))


def notes(plan: Plan) -> list[str]:
    assert plan.prediction is not None
    return [note for note in plan.prediction.assumptions if note.startswith("placement")]


def test_a_plan_on_unlike_links_is_placed_and_says_what_that_gained() -> None:
    cluster = skewed_cluster(8, seed=2)
    plan, plain = planned(cluster), planned(cluster, mapping="hostname")
    assert plan.prediction is not None and plain.prediction is not None
    assert plan.prediction.step_s < plain.prediction.step_s
    assert plan.used_devices == plain.used_devices == tuple(range(8))
    assert notes(plain) == [] and "mapping" not in plain.decisions
    (note,) = notes(plan)
    gain = 1 - plan.prediction.step_s / plain.prediction.step_s
    assert note.startswith(f"placement: searched; {gain:.1%} less than this plan in hostname order")
    assert note in explain_text(plan).split("decisions:")[0]
    check_plan(plan, toy_model(6), cluster)
    simulation = simulate_plan(plan, toy_model(6), cluster)
    assert simulation.timeline.makespan_s == pytest.approx(plan.prediction.step_s, rel=1e-12)


def test_the_same_plan_every_time_and_from_its_own_words() -> None:
    cluster = skewed_cluster(8, seed=3)
    plan = planned(cluster)
    assert planned(cluster).content_hash == plan.content_hash
    constraints = parse_constraints(f"{key}={value}" for key, value in plan.decisions.items())
    again = make_plan(toy_model(6), cluster, JOB, constraints)
    assert again.groups == plan.groups and again.prediction is not None and plan.prediction is not None
    assert again.prediction.step_s == plan.prediction.step_s
    assert notes(again) == ["placement: as given"]


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_a_sequence_move_together(seed: int) -> None:
    cluster = skewed_cluster(8, 2, seed=seed)
    plan, plain = (planned(cluster, context=2, mapping=mapping) for mapping in (None, "hostname"))
    assert plan.prediction is not None and plain.prediction is not None
    assert plan.prediction.step_s < plain.prediction.step_s and notes(plan)[0].startswith("placement: searched")
    for group in plan.groups:
        for first, second in zip(group.devices[::2], group.devices[1::2], strict=True):
            assert second == first + 1 and first % 2 == 0, "on one host, in rising order"
    check_plan(plan, toy_model(6), cluster)
    simulation = simulate_plan(plan, toy_model(6), cluster)
    assert simulation.timeline.makespan_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    constraints = parse_constraints(f"{key}={value}" for key, value in plan.decisions.items())
    assert make_plan(toy_model(6), cluster, JOB, constraints).groups == plan.groups


def test_nothing_is_searched_where_all_links_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **more: object) -> None:
        raise AssertionError("a placement was searched")

    monkeypatch.setattr(in_planner, "search_placement", never)
    monkeypatch.setattr(in_planner, "build_problem", never)
    plan = planned(toy_cluster(2, 4))
    assert notes(plan) == [] and "mapping" not in plan.decisions
    assert notes(planned(skewed_cluster(8), mapping="hostname")) == []


def half_small() -> tuple[Cluster, dict[str, Any]]:
    """Four hosts of which two can hold little more than the leaner lane, the constraints to two lanes: small ones stand
    where hostname order puts the leaner lane."""
    cluster = skewed_cluster(4, seed=5)
    constraints = Constraints(
        stages=2, replicas=(1, 1), schedule="1f1b", microbatches=4, cuts=(2,), recompute=("none",), sharded_state="none"
    )
    free = make_plan(toy_model(6), cluster, JOB, replace(constraints, mapping="hostname"))
    assert free.prediction is not None
    first, last = (lane.peak_bytes for lane in free.prediction.lanes)
    assert first != last
    kind = next(iter(cluster.kinds.values()))
    small = replace(kind, name="small", memory_bytes=int((first + last) / 2))
    leaner = (0, 1) if last > first else (2, 3)
    hosts = tuple(replace(host, kind="small") if i in leaner else host for i, host in enumerate(cluster.hosts))
    return replace(cluster, kinds={**cluster.kinds, "small": small}, hosts=hosts), constraints


def test_no_device_gets_a_stage_that_it_cannot_hold() -> None:
    """Half of the hosts can hold little more than the leanest lane: the others stay where memory is needed."""
    mixed, constraints = half_small()
    plan = make_plan(toy_model(6), mixed, JOB, constraints)
    assert plan.prediction is not None
    assert all(lane.peak_bytes <= lane.limit_bytes for lane in plan.prediction.lanes)


def test_a_mapping_can_be_given() -> None:
    cluster = skewed_cluster(8, seed=2)
    order = (7, 1, 6, 0, 2, 3, 5, 4)
    plan = planned(cluster, mapping=order)
    assert [device for group in plan.groups for device in group.devices] == list(order)
    assert plan.decisions["mapping"] == "7,1,6,0,2,3,5,4"
    assert "7,1,6,0,..." in explain_text(plan)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ((0, 1, 2), ["No plan that fits uses this number of devices", "3 devices", "allowed: 8"]),
        ((0, 1, 2, 3, 4, 5, 6, 6), ["The devices must be different devices", "where: --fix mapping"]),
        ((0, 1, 2, 3, 4, 5, 6, 9), ["The devices must be different devices", "8 of 0 to 7"]),
    ],
)
def test_a_mapping_that_cannot_be(mapping: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        planned(skewed_cluster(8), mapping=mapping)
    for word in words:
        assert word in str(caught.value)


def test_a_mapping_that_does_not_fit() -> None:
    mixed, constraints = half_small()
    with pytest.raises(PlanError) as caught:
        make_plan(toy_model(6), mixed, JOB, replace(constraints, mapping=(2, 3, 0, 1)))
    assert "No plan fits on these devices in this order." in str(caught.value)


def test_what_the_key_takes() -> None:
    assert parse_constraints(["mapping=hostname"]).mapping == "hostname"
    assert parse_constraints(["mapping=2,0,1"]).mapping == (2, 0, 1)
    with pytest.raises(PlanError, match="valid value for 'mapping'"):
        parse_constraints(["mapping=fastest"])
