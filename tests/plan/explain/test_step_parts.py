"""The parts of a step add up to it, and each of them is the difference that its cause makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.support.plan_toys import toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster
from pipefit.cluster.types import Link
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.plan.assemble.predict import PlanSimulation, simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.explain.step_parts import (
    BUBBLE,
    COLLECTIVES,
    COMPUTE,
    GATHER,
    RECOMPUTATION,
    REDUCTION,
    STATE,
    STEP_PARTS,
    TRANSFERS,
    UPDATE,
    step_parts,
)
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job

JOB = Job(batch=8, sequence=256)
MODEL = toy_model(6)

LAYOUTS: Mapping[str, ParallelConfig] = {
    "one device": ParallelConfig(microbatches=2),
    "recomputed": ParallelConfig(microbatches=2, recompute=("full",)),
    "data": ParallelConfig(replicas=(1, 1), microbatches=2, sharded_state="optimizer"),
    "sharded data": ParallelConfig(replicas=(1, 1), microbatches=2, sharded_state="parameters"),
    "tensor": ParallelConfig(shards=(1, 1), sharding="megatron-sp", microbatches=2),
    "pipeline": ParallelConfig(stages=4, microbatches=4, schedule="zb-h1"),
    "all, recomputed": ParallelConfig(
        stages=2,
        replicas=(1, 1),
        shards=(1, 1),
        sharding="megatron",
        microbatches=4,
        sharded_state="gradients",
        recompute=("selective",),
    ),
    "interleaved": ParallelConfig(
        stages=4, placement=(0, 1, 0, 1), microbatches=4, schedule="interleaved-1f1b", recompute=("full",)
    ),
    "slices": ParallelConfig(stages=2, microbatches=2, slices=(128, 128)),
}


def parts_on(cluster: Cluster, decisions: ParallelConfig) -> tuple[dict[str, float], PlanSimulation]:
    plan = build_plan(MODEL, cluster, JOB, decisions)
    network, layers = Network(cluster), best_costs(cluster, graphs=MODEL.graphs.values())
    simulation = simulate_plan(plan, MODEL, cluster, network=network, layers=layers)
    return step_parts(simulation, network, layers), simulation


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_are_not_negative_and_add_up(name: str) -> None:
    parts, simulation = parts_on(plain_spec("8xA100-80"), LAYOUTS[name])
    assert tuple(parts) == STEP_PARTS and min(parts.values()) >= 0.0
    assert sum(parts.values()) == pytest.approx(simulation.timeline.makespan_s, rel=1e-12)


def test_one_device_computes_and_updates() -> None:
    parts, _ = parts_on(plain_spec("1xA100-80"), LAYOUTS["one device"])
    assert {name for name, seconds in parts.items() if seconds} == {COMPUTE, UPDATE}


def test_recomputation_is_the_time_that_it_adds() -> None:
    cluster = plain_spec("1xA100-80")
    parts, recomputed = parts_on(cluster, LAYOUTS["recomputed"])
    plain_parts, plain = parts_on(cluster, LAYOUTS["one device"])
    more_s = recomputed.timeline.makespan_s - plain.timeline.makespan_s
    assert more_s > 0 and parts[RECOMPUTATION] == pytest.approx(more_s, rel=1e-9)
    assert parts[COMPUTE] == pytest.approx(plain_parts[COMPUTE], rel=1e-9)


def test_collectives_are_the_time_that_fast_links_save() -> None:
    cluster = plain_spec("2xA100-80")
    links = {name: Link(bandwidth_bytes_per_s=1e30, latency_s=0.0) for name in cluster.links}
    parts, slow = parts_on(cluster, LAYOUTS["tensor"])
    at_once, fast = parts_on(replace(cluster, links=links), LAYOUTS["tensor"])
    saved_s = slow.timeline.makespan_s - fast.timeline.makespan_s
    assert parts[COLLECTIVES] > 0.1 * saved_s
    assert parts[COLLECTIVES] + parts[REDUCTION] == pytest.approx(saved_s, rel=1e-6)
    assert at_once[COLLECTIVES] == pytest.approx(0.0, abs=1e-12)


def test_sharded_state_is_the_time_that_it_adds_to_the_actions() -> None:
    cluster = plain_spec("2xA100-80")
    parts, _ = parts_on(cluster, LAYOUTS["sharded data"])
    plain, _ = parts_on(cluster, LAYOUTS["data"])
    assert parts[STATE] > 0 and plain[STATE] == 0
    assert parts[COMPUTE] == pytest.approx(plain[COMPUTE], rel=1e-9)
    assert plain[GATHER] > 0 and plain[REDUCTION] > 0 and parts[GATHER] == 0


def test_a_microbatch_alone_waits_for_the_stage_that_it_is_not_on() -> None:
    parts, simulation = parts_on(plain_spec("2xA100-80"), ParallelConfig(stages=2, microbatches=1, schedule="gpipe"))
    timeline = simulation.timeline
    lane = int(timeline.busy_s.argmax())
    computed_s = float(timeline.busy_s[1 - lane]) - float(simulation.costs.step_s[1 - lane])
    edge = simulation.costs.edges[0]
    transfer_s = float(edge.forward_s.max() + edge.backward_s.max())
    assert parts[BUBBLE] + parts[TRANSFERS] == pytest.approx(computed_s + transfer_s, rel=1e-9)
    assert 0 < parts[TRANSFERS] <= transfer_s * (1 + 1e-9)
