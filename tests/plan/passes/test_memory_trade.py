"""The trade curve of a plan: memory against time, fitted orders falling, the chosen point on it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from tests.plan.passes.test_search import little_memory
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.cluster import Rail
from pipefit.codec import dump_text, load_text
from pipefit.plan.explain.text import explain_text, trade_table
from pipefit.plan.make import make_plan
from pipefit.plan.passes.fitted_orders import FITTING_BUDGET
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job, Plan
from pipefit.show.sections_trade import trade_section

JOB = Job(batch=16, sequence=512, precision="bfloat16")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(
        toy_model(8), little_memory(4, beyond=6_000_000), JOB, Constraints(stages=6, replicas=(1,)), tolerance=0
    )


def test_more_memory_is_less_time_along_the_fitted_orders(plan: Plan) -> None:
    assert plan.prediction is not None
    points = plan.prediction.trade
    assert [one.memory_bytes for one in points] == sorted(one.memory_bytes for one in points)
    fitted = [one for one in points if one.schedule == "fit"]
    assert len(fitted) >= 2
    assert all(a.step_s > b.step_s for a, b in pairwise(fitted))


def test_the_plan_is_the_fastest_point_that_fits(plan: Plan) -> None:
    assert plan.prediction is not None
    chosen = [one for one in plan.prediction.trade if one.chosen]
    limit = min(lane.limit_bytes for lane in plan.prediction.lanes)
    assert len(chosen) == 1
    assert chosen[0].step_s == plan.prediction.step_s
    assert chosen[0].memory_bytes == max(lane.peak_bytes for lane in plan.prediction.lanes) <= limit
    inside = [one for one in plan.prediction.trade if one.memory_bytes <= limit]
    assert inside == [one for one in plan.prediction.trade if one.fits] and len(inside) < len(plan.prediction.trade)
    assert chosen[0].step_s <= min(one.step_s for one in inside) * (1 + 2e-3), "a new order must win by a thousandth"


def test_families_and_all_ways_of_recomputing_are_shown(plan: Plan) -> None:
    assert plan.prediction is not None
    shown = {(one.schedule, one.recompute) for one in plan.prediction.trade}
    assert {("1f1b", "none"), ("1f1b", "full"), ("v-half", "none"), ("zb-v", "none"), ("v-min", "selective")} <= shown


def test_large_layouts_get_fitted_orders_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = replace(FITTING_BUDGET, layout_actions=30)
    for module in ("memory_trade", "fitted_orders"):
        monkeypatch.setattr(f"pipefit.plan.passes.{module}.FITTING_BUDGET", budget)
    fixed = Constraints(stages=3, replicas=(1,), microbatches=16)
    for constraints, is_fitted in ((fixed, False), (replace(fixed, schedule="fit"), True)):
        prediction = make_plan(toy_model(8), little_memory(4, beyond=6_000_000), JOB, constraints).prediction
        assert prediction is not None
        assert any(point.schedule == "fit" for point in prediction.trade) == is_fitted


def test_it_is_printed_and_kept(plan: Plan) -> None:
    assert load_text(Plan, dump_text(plan), "plan") == plan
    text, rows = explain_text(plan), trade_table(plan).rows
    assert "memory against time:" in text and rows
    assert [row[4] for row in rows].count("chosen") == 1
    assert len(dump_text(plan.prediction)) < 20_000


def test_devices_of_different_memory_each_keep_to_their_own() -> None:
    """The larger device holds most layers: its lane is the fuller one, with more than the smaller device has."""
    little = little_memory(2, beyond=2_900_000)
    [small] = little.kinds.values()
    large = replace(small, name="large", memory_bytes=small.memory_bytes + 1_000_000)
    hosts = tuple(replace(little.hosts[0], name=name, kind=name, devices=1) for name in (small.name, "large"))
    rail = Rail(name="net", latency_s=((0.0, 0.0),) * 2, bandwidth_bytes_per_s=((1e11, 1e11),) * 2)
    mixed = replace(little, kinds={small.name: small, "large": large}, hosts=hosts, rails=(rail,))
    constraints = Constraints(stages=2, replicas=(1,), mapping="hostname", microbatches=8, cuts=(1,))
    plan = make_plan(toy_model(8), mixed, JOB, constraints, tolerance=0)
    assert plan.prediction is not None
    assert {lane.limit_bytes for lane in plan.prediction.lanes} == {small.memory_bytes, large.memory_bytes}
    fullest = max(plan.prediction.lanes, key=lambda lane: lane.peak_bytes / lane.limit_bytes)
    assert fullest.peak_bytes > small.memory_bytes, "only the larger device holds that"
    points = plan.prediction.trade
    [chosen] = [one for one in points if one.chosen]
    filled = fullest.peak_bytes / fullest.limit_bytes
    assert chosen.memory_bytes == pytest.approx(filled * small.memory_bytes, rel=1e-12)
    for one in points:
        assert one.fits == (one.memory_bytes <= small.memory_bytes)
        alone = replace(plan, prediction=replace(plan.prediction, trade=(replace(one, chosen=False),)))
        assert trade_table(alone).rows[0][4] == ("" if one.fits else "does not fit")
    assert "points right of the dashed line do not fit" in trade_section(plan.prediction)


def test_on_a_single_lane_recomputing_is_the_trade() -> None:
    alone = make_plan(toy_model(3), toy_cluster(1, 1), Job(batch=4, sequence=64))
    assert alone.prediction is not None
    points = {one.recompute: one for one in alone.prediction.trade}
    assert {one.schedule for one in points.values()} == {alone.decisions["schedule"]}
    assert [one.step_s for one in points.values() if one.chosen] == [alone.prediction.step_s]
    assert points["full"].memory_bytes < points["none"].memory_bytes and points["full"].step_s > points["none"].step_s
    assert "memory against time" in explain_text(alone)
