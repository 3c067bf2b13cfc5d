"""Replicas of unlike kinds with unlike rows: each kind of device is judged by what it holds itself, against plans in
which it is alone; and such plans are found, where they were refused as long as the largest rows met the smallest
memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.plan.devices.test_device_kinds import cluster, every_way, kind
from tests.support.plan_toys import toy_model

from pipefit.cost.memory.order_limits import order_limits
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.plan.assemble.predict import PlanSimulation, simulate_plan
from pipefit.plan.cutting.layer_cut import some_cut_fits
from pipefit.plan.cutting.partition import partition_layers
from pipefit.plan.cutting.rows import limits_of, memory_of
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.explain.text import memory_table
from pipefit.plan.make import make_plan
from pipefit.plan.passes.search import search_plans
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job

JOB = Job(batch=16, sequence=512, precision="bfloat16")
BIG, SMALL = kind("big", 3.0), kind("small", 1.0)
BOTH = cluster((BIG, 3), (SMALL, 3))
BY_REPLICA = (0, 3, 1, 4, 2, 5)
"""[lane][replica]: every lane has a big device, and a small one."""


def simulation(job: Job = JOB, **decisions: object) -> PlanSimulation:
    choice = ParallelConfig(**{"stages": 3, "microbatches": 4, "schedule": "1f1b"} | decisions)  # type: ignore[arg-type]
    model = toy_model(6)
    return simulate_plan(build_plan(model, BOTH, job, choice), model, BOTH)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "v-half"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shares", [(3, 1), (1, 3), (2, 2)])
def test_a_kind_needs_what_it_needs_alone(schedule: str, recompute: str, shares: tuple[int, int]) -> None:
    """Against the same layers on this replica's devices alone, with its rows as the whole batch."""
    stages = 6 if schedule == "v-half" else 3
    common = {"schedule": schedule, "recompute": (recompute,), "cuts": (2, 5) if stages == 3 else (1, 2, 4, 5, 7)}
    if stages == 6:
        common["placement"] = (0, 1, 2, 2, 1, 0)
    both = simulation(replicas=shares, devices=BY_REPLICA, **common)
    assert bool(both.costs.kinds) == (shares != (2, 2))
    for replica, own in enumerate((BIG, SMALL)):
        rows = replace(JOB, batch=JOB.batch * shares[replica] // sum(shares))
        alone = simulation(rows, devices=BY_REPLICA[replica::2], **common)
        message = max(float(edge.forward_bytes.max()) for edge in alone.costs.edges)
        in_step = both.timeline.memory_under(alone.costs)
        for lane in range(3):
            found = [one for one in both.device_peaks[lane] if one.kind in (own.name, "")]
            assert len(found) == 1
            assert found[0].peak_bytes == pytest.approx(in_step[lane].peak_bytes, rel=1e-12)
            own_pace = alone.device_peaks[lane][0].peak_bytes
            assert abs(found[0].peak_bytes - own_pace) <= 2 * message, "more or less is only under way"
    largest = max(range(2), key=lambda replica: shares[replica])
    for lane, whole in enumerate(both.timeline.peak_bytes.tolist()):
        assert max(one.peak_bytes for one in both.device_peaks[lane]) == whole, f"replica {largest} holds most"


def test_parts_of_a_split_state_are_counted_by_shares() -> None:
    """By hand: 1/4 and 3/4 of twelve bytes for each parameter element."""
    whole = simulation(replicas=(3, 1), devices=BY_REPLICA)
    split = simulation(replicas=(3, 1), devices=BY_REPLICA, sharded_state="optimizer")
    for lane in range(3):
        state_bytes = 12  # of AdamW: a float32 master and two moments
        shares = {"big": 3 / 4, "small": 1 / 4}
        for kind_ in ("big", "small"):
            before, after = (
                next(one for one in each.device_peaks[lane] if one.kind == kind_) for each in (whole, split)
            )
            elements = before.static["parameters"] / 2
            assert after.static["optimizer"] == shares[kind_] * elements * state_bytes
            assert before.static["optimizer"] == elements * state_bytes


def test_limits_for_orders_keep_every_kind_within_its_memory() -> None:
    """For random memory sizes: an order whose fullest device is at its limit fills some kind, and none too much."""
    random = np.random.default_rng(3)
    close = 0
    ways = itertools.product([(1, 3), (3, 1)], ["none", "full"])
    every = [simulation(replicas=shares, devices=BY_REPLICA, recompute=(way,)) for shares, way in ways]
    for found in every * 50:
        kinds = tuple(
            replace(one, limit_bytes=WORKSPACE_BYTES + 1e5 * random.uniform(1, 10, 3)) for one in found.costs.kinds
        )
        costs = replace(found.costs, kinds=kinds)
        limits = order_limits(costs, found.timeline.schedule.placement, found.least_bytes)
        told = replace(found, costs=costs)
        for lane, (limit, whole) in enumerate(zip(limits, found.timeline.peak_bytes.tolist(), strict=True)):
            fits = all(one.peak_bytes <= one.limit_bytes for one in told.device_peaks[lane])
            assert fits or whole > limit
            close += fits and whole > limit
    assert close < 0.02 * 600, "hardly ever is anything lost"


def test_a_small_device_with_few_rows_takes_part() -> None:
    """A device that would not hold the rows of the large one, and holds its own."""
    model, job = toy_model(1), replace(JOB, batch=8, sequence=2048)
    constraints = Constraints(schedule="1f1b", sharded_state="none", recompute=("none",), microbatches=1, stages=1)

    def need(rows: int) -> int:
        one = cluster((BIG, 1))
        plan = build_plan(
            model, one, replace(job, batch=rows), ParallelConfig(stages=1, microbatches=1, schedule="1f1b")
        )
        return int(simulate_plan(plan, model, one).peaks_bytes[0])

    small = kind("small", 1.0, (need(2) + need(3)) // 2)
    plan = make_plan(model, cluster((BIG, 1), (small, 1)), job, constraints)
    assert plan.decisions["replicas"] in ("3:1", "1:3")
    assert plan.prediction is not None
    (lane,) = plan.prediction.lanes
    (other,) = lane.others
    assert (lane.kind, other.kind, other.devices) == ("small", "big", (0,)), "the fullest for its limit first"
    assert (lane.peak_bytes, other.peak_bytes) == (need(2), need(6))
    assert [row[0] for row in memory_table(plan).rows] == ["0 small", "0 big"]
    assert [row[-1] for row in memory_table(plan).rows] == [f"{need(2) / small.memory_bytes:.0%}", "0%"]
    assert (lane.limit_bytes, other.limit_bytes) == (small.memory_bytes, BIG.memory_bytes)
    tight = make_plan(model, cluster((BIG, 1), (kind("small", 1.0, need(1) - 1), 1)), job, constraints)
    assert tight.used_devices == (0,), "what no row fits into is left out"


@pytest.mark.parametrize("memory", [0.6, 0.7, 0.8])
def test_the_search_finds_the_best_where_memory_is_scarce(memory: float) -> None:
    """Against every choice of devices and division of the rows, on a fast large device and two slow small ones."""
    model, job = toy_model(3), replace(JOB, batch=4, sequence=2048)
    constraints = Constraints(schedule="1f1b", recompute=("none",), sharded_state="none", stages=1)
    large = cluster((BIG, 1))
    whole = build_plan(model, large, job, ParallelConfig(stages=1, microbatches=1, schedule="1f1b"))
    most = simulate_plan(whole, model, large).peaks_bytes[0]
    small = kind("small", 1.0, int(WORKSPACE_BYTES + memory**2 * (most - WORKSPACE_BYTES)))
    big = kind("big", 3.0, int(WORKSPACE_BYTES + memory * (most - WORKSPACE_BYTES)))
    context = PlannerContext(model, cluster((big, 1), (small, 2)))
    ways = [one for one in every_way(context, job, (1, 2, 4)) if one.lane_count == 1]
    fitting = [
        one
        for one in (evaluate_candidate(context, way, context.make_skeleton(job, way)) for way in ways)
        if one.simulation.fits_in_memory
    ]
    assert len(fitting) < len(ways)
    best = min(fitting, key=lambda one: one.step_s)
    assert len(best.decisions.replicas) > 1 and len({*best.decisions.replicas}) > 1
    assert search_plans(context, job, constraints).fitting[0].step_s <= best.step_s * (1 + 1e-9)


def test_cuts_keep_every_kind_within_its_memory() -> None:
    """Against all cuts, for random limits of two kinds: whether any fits, and the fastest that does."""
    random = np.random.default_rng(5)
    context, seen = PlannerContext(toy_model(4), BOTH), set()
    decisions = ParallelConfig(stages=3, microbatches=4, replicas=(3, 1), devices=BY_REPLICA, schedule="1f1b")
    rows = context.layer_cutter.stage_rows(JOB, decisions)
    layers = len(rows[0].forward_s)
    for _ in range(200):
        has = random.uniform(0.15, 1.2, 2) * [float(kind.filled_bytes(3)[-1]) for kind in rows[0].kinds]
        told = [
            replace(row, kinds=tuple(replace(k, limit_bytes=float(b)) for k, b in zip(row.kinds, has, strict=True)))
            for row in rows
        ]
        best = float("inf")
        for cuts in itertools.combinations(range(1, layers), 2):
            runs = [*itertools.pairwise((0, *cuts, layers))]
            needs = [
                [float((kind.static_bytes + flight * kind.saved_bytes)[a:b].sum()) for kind in row.kinds]
                for row, flight, (a, b) in zip(told, (3, 2, 1), runs, strict=True)
            ]
            times = [float((row.forward_s + row.backward_s)[a:b].sum()) for row, (a, b) in zip(told, runs, strict=True)]
            if all(need <= limit for each in needs for need, limit in zip(each, has, strict=True)):
                best = min(best, max(times))
        assert some_cut_fits(told, (3, 2, 1)) == (best < float("inf"))
        found = partition_layers(
            [row.forward_s + row.backward_s for row in told], memory_of(told, (3, 2, 1)), limits_of(told, (1, 1, 1))
        )
        assert (found is None) == (best == float("inf"))
        if found is not None:
            runs = [*itertools.pairwise(found)]
            took = max(
                float((row.forward_s + row.backward_s)[a:b].sum()) for row, (a, b) in zip(told, runs, strict=True)
            )
            assert took == pytest.approx(best, rel=1e-12)
        seen.add(best)
    assert len(seen) > 2
