"""Collectives of ZeRO-2 and ZeRO-3 within the actions: by hand, against a walk over two queues, and in whole plans."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.cost.comm.collectives import all_gather_s, reduce_scatter_s
from pipefit.cost.comm.network import Network
from pipefit.cost.memory.lanes import lane_parts
from pipefit.cost.pipeline.state_traffic import largest_pair, overlapped_s, state_traffic
from pipefit.cost.work import PipelineWork
from pipefit.model.graph import Graph
from pipefit.optimizers.sharded_state import STATES, ShardedState
from pipefit.plan.assemble.predict import PlanSimulation, simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.show.traffic import step_traffic

JOB = Job(batch=8, sequence=16, precision="bfloat16")
MODEL, TIED = toy_model(4), toy_model(4, tied=True)


def simulate_state(state: ShardedState, tied: bool = False, **changes: object) -> PlanSimulation:
    settings: dict[str, object] = {"replicas": (1, 1, 1, 1), "microbatches": 2, **changes}
    model = TIED if tied else MODEL
    plan = build_plan(model, toy_cluster(), JOB, ParallelConfig(sharded_state=state, **settings))  # type: ignore[arg-type]
    return simulate_plan(plan, model, toy_cluster())


def walk_layers(seconds: list[float], before: list[float], behind: list[float]) -> float:
    """Return the end of an action: layers run on one clock, collectives on another, in the order of the runtime."""
    compute = link = before[0]
    for index, duration in enumerate(seconds):
        start = max(compute, link)
        link = start + (before[index + 1] if index + 1 < len(seconds) else 0.0) + (behind[index - 1] if index else 0.0)
        compute = start + duration
    return max(compute, link) + behind[-1]


@pytest.mark.parametrize("seed", range(20))
def test_collectives_overlap_the_neighbouring_layer(seed: int) -> None:
    draw = random.Random(seed)
    seconds = [draw.choice((0.0, draw.uniform(0, 4))) for _ in range(draw.randint(1, 6))]
    before, behind = ([draw.uniform(0, 3) for _ in seconds] for _ in range(2))
    assert overlapped_s(seconds, before, behind, 1.0) == pytest.approx(walk_layers(seconds, before, behind))
    assert overlapped_s(seconds, before, behind, 0.0) == pytest.approx(sum(seconds) + sum(before) + sum(behind))


def test_two_layers_are_complete() -> None:
    assert largest_pair([5.0, 1.0, 3.0, 3.0]) == 6.0
    assert largest_pair([5.0]) == 5.0


def test_each_layer_is_gathered_and_summed_over_the_replicas() -> None:
    work, network = simulate_state("parameters").work, Network(toy_cluster())
    traffic = state_traffic(work.stages[0], "bfloat16", network)
    assert traffic is not None
    counts = [sum(_elements(graphs[0])) for graphs in work.stages[0].layers]
    assert sum(counts) == work.stages[0].parameters.trainable[0]
    assert traffic.gather_s == tuple(all_gather_s(network, [[0, 1, 2, 3]], n * 2) if n else 0.0 for n in counts)
    assert traffic.reduce_s == tuple(reduce_scatter_s(network, [[0, 1, 2, 3]], n * 4) if n else 0.0 for n in counts)
    pair = max(a + b for a, b in pairwise(counts))
    assert (traffic.parameter_bytes, traffic.gradient_bytes) == (2 * pair, 4 * pair)
    sums_only = state_traffic(simulate_state("gradients").work.stages[0], "bfloat16", network)
    assert sums_only is not None
    assert set(sums_only.gather_s) == {0.0}
    assert sums_only.parameter_bytes == 0.0
    assert state_traffic(simulate_state("optimizer").work.stages[0], "bfloat16", network) is None


def test_static_memory_is_divided_by_the_replicas() -> None:
    elements = simulate_state("none").work.stages[0].parameters.trainable[0]
    held = {state: lane_parts(simulate_state(state).work)[0] for state in STATES}
    for state, parameters, gradients, optimizer in (
        ("none", 2, 4, 12),
        ("optimizer", 2, 4, 3),
        ("gradients", 2, 1, 3),
        ("parameters", 0.5, 1, 3),
    ):
        parts = [held[state][name] for name in ("parameters", "gradients", "optimizer")]
        assert parts == [parameters * elements, gradients * elements, optimizer * elements], state


def test_nothing_is_summed_or_gathered_at_the_end_of_the_step() -> None:
    costs = {state: simulate_state(state).costs for state in STATES}
    assert costs["optimizer"].reduce_s[0] > 0
    assert costs["optimizer"].gather_s[0] > 0
    assert (costs["gradients"].reduce_s[0], costs["gradients"].gather_s[0]) == (0.0, costs["optimizer"].gather_s[0])
    assert (costs["parameters"].reduce_s[0], costs["parameters"].gather_s[0]) == (0.0, 0.0)
    times = {state: float(costs[state].actions["B"].time_s[0, 0, 0]) for state in STATES}
    assert times["none"] == times["optimizer"] < times["gradients"] <= times["parameters"]


def test_parameters_of_several_layers_stay_complete() -> None:
    work = simulate_state("parameters", tied=True, stages=1).work
    stage = work.stages[0]
    sharded = sum(max(counts) for counts in stage.sharded_elements)
    tied = stage.parameters.trainable[0] - sharded
    assert tied > 0
    assert (stage.reduced_elements, stage.gathered_elements) == (tied, tied)


@pytest.mark.parametrize("state", ["gradients", "parameters"])
def test_the_traffic_counts_every_microbatch(state: ShardedState) -> None:
    simulated = simulate_state(state)
    traffic = step_traffic(simulated.work, Network(toy_cluster()), 2)
    elements = simulated.work.stages[0].parameters.trainable[0]
    passed = 3 / 4 * elements
    # Two microbatches: sums of float32 gradients, two gathers each, and under ZeRO-2 one gather after the update.
    gathers = 2 * 2 * 2 if state == "parameters" else 2
    assert dict(traffic.bytes[0, 1]) == {"reduction": 2 * 4 * passed, "parameters": gathers * passed}


@pytest.mark.parametrize("state", ["gradients", "parameters"])
@pytest.mark.parametrize("context", [1, 2])
def test_a_simulated_step_pays_for_the_collectives_of_every_action(state: ShardedState, context: int) -> None:
    """Replicas that meet in every microbatch run in step: the times of replicas alone have no collectives."""
    simulated = simulate_state(state, replicas=(1, 1), context=context)
    spans = [span for span in simulated.timeline.all_spans() if span.action.kind in "FB"]
    assert len(spans) == 4
    for span in spans:
        action = span.action
        cost = simulated.costs.actions[action.kind].cost_of(action.stage, action.microbatch, 0)
        assert span.stop_s - span.start_s == pytest.approx(cost.time_s + simulated.costs.overhead_s, rel=1e-9)
    alone = simulate_state("none", replicas=(1, 1), context=context).timeline.compute_end_s
    assert simulated.timeline.compute_end_s > alone


def test_one_replica_shards_nothing() -> None:
    work: PipelineWork = simulate_state("parameters", replicas=(1,), stages=2).work
    assert not any(stage.has_sharded_layers for stage in work.stages)
    assert replace(work.stages[0], sharded_elements=()).reduced_elements == work.stages[0].reduced_elements


def _elements(graph: Graph) -> list[int]:
    return [prod(map(int, spec.shape)) for spec in graph.parameters if spec.trainable]
