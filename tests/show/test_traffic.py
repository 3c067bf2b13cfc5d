"""The traffic of a step: by hand for small plans, and totals that follow from what collectives move."""

import pytest
from tests.support.show_toys import toy_cluster, toy_model, toy_plan

from pipefit.cluster.topology import host_index
from pipefit.cost.comm.network import Network
from pipefit.layout import Mesh, MeshAxis
from pipefit.model.graph import Graph, Operator, TensorSpec
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.show.traffic import _share_fractions, step_traffic

WIDTH = 8  # of the toy model's hidden state


def traffic_of(**shape):
    plan, cluster = toy_plan(**shape)
    work = simulate_plan(plan, toy_model(9), cluster).work
    return plan, work, cluster, step_traffic(work, Network(cluster), plan.order.microbatches)


def test_a_chain_sends_the_hidden_state_forward_and_its_gradient_back():
    plan, _, _, traffic = traffic_of(stages=4, microbatches=8)
    size = plan.job.batch * plan.job.sequence * WIDTH * 4
    ahead = {(i, i + 1): {"activations": size} for i in range(3)}
    back = {(i + 1, i): {"gradients": size} for i in range(3)}
    assert {pair: dict(parts) for pair, parts in traffic.bytes.items()} == {**ahead, **back}


def test_replicas_each_send_their_rows_and_reduce_in_a_ring():
    plan, work, _, traffic = traffic_of(stages=2, microbatches=4, replicas=(1, 1))
    half = plan.job.batch * plan.job.sequence * WIDTH * 4 / 2
    assert traffic.bytes[0, 2]["activations"] == traffic.bytes[1, 3]["activations"] == half
    assert (0, 3) not in traffic.bytes
    gradients = work.stages[0].parameters.trainable[0] * 4
    # All-reduce in a ring of two: each device sends 2 (n - 1)/n of the gradients, here all of them.
    assert dict(traffic.bytes[0, 1]) == {"reduction": gradients} == dict(traffic.bytes[1, 0])


def test_sharded_state_halves_the_reduction_and_gathers_parameters():
    _, work, _, traffic = traffic_of(stages=2, microbatches=4, replicas=(1, 1), sharded_state="optimizer")
    size = work.stages[1].parameters.trainable[0] * 4
    assert dict(traffic.bytes[2, 3]) == {"reduction": size / 2, "parameters": size / 2}


def test_over_hosts_each_device_sums_its_part_with_its_peers():
    _, work, cluster, traffic = traffic_of(stages=1, microbatches=1, replicas=(1,) * 8, hosts=2, devices=4)
    gradients = work.stages[0].parameters.trainable[0] * 4
    between = sum(
        sum(parts.values())
        for (a, b), parts in traffic.bytes.items()
        if host_index(cluster, a) != host_index(cluster, b)
    )
    # Two rings' passes (2) over two hosts: each of 4 places sends (n - 1)/n of a quarter both ways, and twice.
    assert between == pytest.approx(2 * gradients * (1 / 2) * 2)
    inside = traffic.bytes[0, 1]["reduction"]
    assert inside == pytest.approx(2 * gradients * 3 / 4)


def test_tied_parameters_exchange_their_gradients_between_stages():
    model, cluster = toy_model(9, tied=True), toy_cluster()
    decisions = ParallelConfig(stages=2, microbatches=2)
    plan = build_plan(model, cluster, Job(batch=4, sequence=8), decisions)
    work = simulate_plan(plan, model, cluster).work
    traffic = step_traffic(work, Network(cluster), 2)
    embedding = 64 * WIDTH * 4
    assert traffic.bytes[0, 1]["reduction"] == embedding == traffic.bytes[1, 0]["reduction"]


@pytest.mark.parametrize("sharding", ["megatron", "megatron-sp"])
def test_tensor_parallel_layers_pass_each_activation_four_times(sharding):
    """Megatron: one all-reduce forward and one backward a block, or the gathers and scatters that make them up.

    Embedding and head make one more. The loss reduces two numbers a token, and their sum."""
    blocks, rows = 9, 16
    _, work, _, traffic = traffic_of(blocks=blocks, stages=1, microbatches=2, shards=(1, 1), sharding=sharding)
    passed = (blocks + 1) * 4 * rows * 64 * WIDTH * 4 / 2
    statistics = 2 * 2 * rows * 64 * 4 / 2
    scalar = 2 * 4 * 4 / 2  # 4 passes of 4 bytes, 2 microbatches
    assert dict(traffic.bytes[0, 1]) == {"shards": passed + statistics + scalar}
    assert work.stages[0].parameters.whole == (0, 0), "no parameter is replicated"


def collective_stage(work, recompute):
    """The first stage of `work` with a layer that gathers, reduces and scatters over two shards."""
    from dataclasses import replace

    shape = ("B", "T", WIDTH)
    graph = Graph(
        inputs=(TensorSpec(name="x", shape=("B", "T", WIDTH // 2)),),
        outputs=("s",),
        operators=(
            Operator(kind="all_gather", inputs=("x",), outputs=("g",), attributes={"dim": 2, "size": WIDTH}),
            Operator(kind="all_reduce", inputs=("g",), outputs=("r",)),
            Operator(kind="reduce_scatter", inputs=("r",), outputs=("s",), attributes={"dim": 2, "size": WIDTH // 2}),
        ),
        parameters=(),
        tensors=(
            TensorSpec(name="g", shape=shape),
            TensorSpec(name="r", shape=shape),
            TensorSpec(name="s", shape=("B", "T", WIDTH // 2)),
        ),
    )
    group = Mesh(axes=(MeshAxis(name="replica", shares=(1,)), MeshAxis(name="shard", shares=(1, 1))), devices=(0, 1))
    counts = replace(work.stages[0].parameters, whole=(0, 0), trainable=(0, 0), frozen=(0, 0))
    stage = replace(
        work.stages[0], group=group, layers=((graph, graph),), rows=(2,), slices=(64,), recompute=recompute,
        parameters=counts,
    )  # fmt: skip
    return replace(work, stages=(stage,), edges=())


def test_collectives_of_a_shard_program_count_forward_and_backward():
    _, work, cluster, _ = traffic_of(stages=1, microbatches=1)
    traffic = step_traffic(collective_stage(work, "none"), Network(cluster), 3)
    whole = 2 * 64 * WIDTH * 4
    # Passes over the ring: gather 1 + scatter back 1, reduce 2 + 2, scatter 1 + gather back 1: 8 in all, (n-1)/n = 1/2.
    assert dict(traffic.bytes[0, 1]) == {"shards": 3 * 8 * whole / 2}
    assert traffic.pair_totals()[1, 0] == 3 * 8 * whole / 2


def test_packed_rows_and_ragged_edges_count_what_every_microbatch_has():
    from dataclasses import replace

    _, work, cluster, _ = traffic_of(stages=1, microbatches=1)
    alike = collective_stage(work, "none")
    packed = replace(alike.stages[0], packed=(((10, 52),), ((0, 0),), ((6, 36),)))
    traffic = step_traffic(replace(alike, stages=(packed,)), Network(cluster), 3)
    assert dict(traffic.bytes[0, 1]) == {"shards": 8 * (10 + 6) * WIDTH * 4 / 2}
    frozen = replace(packed, frozen=1)
    traffic = step_traffic(replace(alike, stages=(frozen,)), Network(cluster), 3)
    assert dict(traffic.bytes[0, 1]) == {"shards": 4 * (10 + 6) * WIDTH * 4 / 2}, "forward alone: 1 + 2 + 1 passes"
    _, work, cluster, _ = traffic_of(stages=2, microbatches=4)
    messages = tuple((((0, 1, size),), ((1, 0, size / 2),)) for size in (40.0, 0.0, 20.0, 4.0))
    ragged = replace(work, edges=tuple(replace(edge, ragged=messages) for edge in work.edges))
    traffic = step_traffic(ragged, Network(cluster), 4)
    assert traffic.bytes[0, 1]["activations"] == 64.0 and traffic.bytes[1, 0]["gradients"] == 32.0


def test_of_nothing_everyone_has_its_share():
    """Places of images to generate, over shards, in data that have none."""
    assert _share_fractions(0, (1, 3)) == (0.25, 0.75) and _share_fractions(4, (1, 3)) == (0.25, 0.75)
