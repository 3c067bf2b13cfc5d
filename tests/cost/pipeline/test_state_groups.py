"""Costs of state that groups of replicas shard: bytes, rings and seconds, by hand and in whole plans."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.plan_toys import toy_model

from pipefit.cluster import parse_spec
from pipefit.cost.comm.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from pipefit.cost.comm.network import Network
from pipefit.cost.memory.lanes import lane_parts
from pipefit.cost.pipeline.overlap import delay_pieces, hidden_s
from pipefit.cost.pipeline.reductions import copies_s, gather_s, reduce_s
from pipefit.cost.pipeline.rings import copy_rings, state_rings
from pipefit.cost.pipeline.state_traffic import state_traffic
from pipefit.cost.work import PipelineWork
from pipefit.layout import Mesh, MeshAxis, group_peers, home_group
from pipefit.optimizers.sharded_state import ShardedState
from pipefit.plan.assemble.predict import PlanSimulation, simulate_plan
from pipefit.plan.check.rules import plan_problems
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.show.traffic import step_traffic

JOB = Job(batch=8, sequence=16, precision="bfloat16")
MODEL = toy_model(4)
CLUSTER = parse_spec("2x4xA100-80:1GB/s")
STATES: tuple[ShardedState, ...] = ("optimizer", "gradients", "parameters")


def simulate(state: ShardedState, **changes: Any) -> PlanSimulation:
    settings: dict[str, Any] = {"replicas": (1,) * 8, "microbatches": 1, **changes}
    return simulate_plan(
        build_plan(MODEL, CLUSTER, JOB, ParallelConfig(sharded_state=state, **settings)), MODEL, CLUSTER
    )


def test_groups_are_neighbours_and_peers_hold_the_same_piece() -> None:
    axes = [MeshAxis(name=name, shares=(1, 1)) for name in ("replica", "context", "shard")]
    mesh = Mesh(axes=tuple(axes), devices=(7, 3, 0, 1, 5, 4, 2, 6))  # type: ignore[arg-type]
    groups = mesh.groups_along(7, ("replica", "context"), 2)
    assert groups == ((0, 7), (2, 5))
    assert home_group(groups, 5) == (2, 5)
    assert group_peers(groups, 7) == (7, 5) and group_peers(groups, 2) == (0, 2)
    assert mesh.groups_along(7, ("replica", "context"), 0) == ((0, 2, 5, 7),)
    assert mesh.groups_along(7, (), 2) == ((7,),)
    assert mesh.spread_along((0, 7), ("shard",)) == (0, 1, 7, 3)


def test_rings_are_those_of_the_runtime() -> None:
    work = simulate("optimizer", state_group=2, context=2, replicas=(1, 1), shards=(1, 1), sharding="megatron-sp").work
    stage = work.stages[0]
    assert state_rings(stage) == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert copy_rings(stage) == ((0, 4), (2, 6), (1, 5), (3, 7))
    for ring in copy_rings(stage):
        for device in ring:
            assert group_peers(stage.group.groups_along(device, ("replica", "context"), 2), device) == ring


@pytest.mark.parametrize("state", STATES)
def test_static_bytes_are_divided_by_the_group(state: ShardedState) -> None:
    whole, plain, grouped = (
        lane_parts(simulate(kind, **more).work)[0]
        for kind, more in (("none", {}), (state, {}), (state, {"state_group": 4}))  # type: ignore[arg-type]
    )
    assert grouped["optimizer"] == whole["optimizer"] / 4 == 2 * plain["optimizer"]
    names = {"optimizer": (), "gradients": ("gradients",), "parameters": ("gradients", "parameters")}[state]
    for name in ("gradients", "parameters"):
        assert grouped[name] == (whole[name] / 4 if name in names else whole[name])


def test_a_group_of_all_costs_what_no_group_costs() -> None:
    for state in STATES:
        plain, grouped = simulate(state), simulate(state, state_group=8)
        assert plain.timeline.makespan_s == grouped.timeline.makespan_s and plain.peaks_bytes == grouped.peaks_bytes


@pytest.mark.parametrize("state", STATES)
def test_collectives_stay_in_the_group_and_pieces_cross_once(state: ShardedState) -> None:
    """A group is a host: the gathers and sums of layers take no time between hosts."""
    work, network = simulate(state, state_group=4, microbatches=1).work, Network(CLUSTER)
    (stage,) = work.stages
    elements = stage.parameters.trainable[0]
    inside, across = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]
    pieces_s = all_reduce_s(network, across, elements * 4 / 4)
    assert copies_s(stage, work, network) == pytest.approx(pieces_s)
    if state == "optimizer":
        assert reduce_s(stage, work, network) == pytest.approx(
            reduce_scatter_s(network, inside, elements * 4) + pieces_s
        )
    else:
        assert reduce_s(stage, work, network) == pytest.approx(pieces_s)
        traffic = state_traffic(stage, "bfloat16", network)
        assert traffic is not None
        counts = [max(layer) for layer in stage.sharded_elements]
        assert traffic.reduce_s == tuple(reduce_scatter_s(network, inside, n * 4) if n else 0.0 for n in counts)
        if state == "parameters":
            assert traffic.gather_s == tuple(all_gather_s(network, inside, n * 2) if n else 0.0 for n in counts)
    gathered_s = all_gather_s(network, inside, elements * 2)
    assert gather_s(stage, work, network) == (0.0 if state == "parameters" else pytest.approx(gathered_s))


@pytest.mark.parametrize("cuts", [(), (3,), (5,), (6,)])
@pytest.mark.parametrize("state", STATES)
def test_a_plan_is_simulated_as_it_was_searched(state: ShardedState, cuts: tuple[int, ...]) -> None:
    """Also with a last stage that has no parameters."""
    context = PlannerContext(MODEL, CLUSTER)
    config = ParallelConfig(replicas=(1,) * 4, cuts=cuts, microbatches=2, sharded_state=state, state_group=2)
    parts = context.make_skeleton(JOB, config)
    found = evaluate_candidate(context, config, parts)
    plan = context.assemble_plan(parts, found.decisions, found.simulation.timeline.schedule)
    again = simulate_plan(plan, MODEL, CLUSTER)
    assert again.timeline.makespan_s == found.step_s and again.peaks_bytes == found.simulation.peaks_bytes
    assert not list(plan_problems(plan, MODEL, CLUSTER))


@pytest.mark.parametrize("state", STATES)
def test_pieces_cross_the_network_once_a_step(state: ShardedState) -> None:
    work, network = simulate(state, state_group=4).work, Network(CLUSTER)

    def crossing_bytes(work: PipelineWork, microbatches: int) -> float:
        pairs = step_traffic(work, network, microbatches).pair_totals()
        return sum(size for (source, target), size in pairs.items() if source // 4 != target // 4)

    piece_bytes = work.stages[0].parameters.trainable[0] / 4 * 4
    assert crossing_bytes(work, 1) == crossing_bytes(work, 8) == pytest.approx(8 * piece_bytes)
    plain = simulate(state).work
    assert (crossing_bytes(plain, 8) > 3 * crossing_bytes(plain, 1)) == (state != "optimizer")


def test_late_sums_overlap_two_layers_later() -> None:
    assert delay_pieces([1, 2, 3, 4, 5], 2) == [6, 4, 5, 0, 0]
    assert delay_pieces([1, 2], 2) == [3, 0]
    seconds = [1.0] * 5
    pieces = list(zip(delay_pieces([1, 1, 1, 1, 1], 2), seconds, strict=True))
    # Sums of layers 4, 3 and (2, 1, 0) start when layers 2, 1 and 0 are finished.
    assert hidden_s(5.0, pieces, 0.0) == pytest.approx(2.0)
