"""The roofline of a layer and the memory by parts, against figures worked out by hand from the graph."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.plan_toys import (
    INNER,
    VOCABULARY,
    WIDTH,
    block_graph,
    embed_graph,
    loss_graph,
    toy_cluster,
    toy_model,
)

from pipefit.cluster.types import DeviceKind
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.cost.pipeline.table import ACTION_OVERHEAD_S, cost_table, lane_parts
from pipefit.cost.static_memory import WORKSPACE_BYTES, optimizer_traffic_bytes, static_parts
from pipefit.layout import Mesh, MeshAxis
from pipefit.optimizers import find_optimizer
from pipefit.plan.assemble.pipeline_work import pipeline_work
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job

ADAMW = find_optimizer("adamw")
ROWS, TOKENS = 3, 16
PLACE = MicrobatchShape(ROWS, TOKENS, 0, TOKENS)


def kind(*, flops: float = 1e12, bandwidth: float = 1e30, overhead_s: float = 0.0) -> DeviceKind:
    return DeviceKind(
        name="toy",
        memory_bytes=10**9,
        peak_flops_per_s={"float64": flops, "float32": flops, "bfloat16": flops},
        memory_bandwidth_bytes_per_s=bandwidth,
        efficiency=0.5,
        overhead_s=overhead_s,
    )


def test_where_compute_binds_time_is_flops_over_the_reached_rate() -> None:
    cost = RooflineCosts().layer_cost(LayerQuery(block_graph(), PLACE, kind(), "float32"))
    forward = 2 * 2 * ROWS * TOKENS * WIDTH * INNER
    assert cost.forward_s == pytest.approx(forward / 0.5e12)
    assert cost.input_s == pytest.approx(forward / 0.5e12)
    assert cost.weight_s == pytest.approx(forward / 0.5e12)


def test_where_memory_binds_time_is_bytes_over_bandwidth() -> None:
    cost = RooflineCosts().layer_cost(LayerQuery(block_graph(), PLACE, kind(flops=1e30, bandwidth=1e9), "float32"))
    x, h, weight = ROWS * TOKENS * WIDTH, ROWS * TOKENS * INNER, WIDTH * INNER
    linears = (x + weight + h) + (h + weight + x)
    pointwise = 2 * h + 3 * x
    assert cost.forward_s == pytest.approx(4 * (linears + pointwise) / 1e9)
    assert cost.input_s == pytest.approx(4 * (linears + pointwise + h + x) / 1e9), "output gradients of silu and add"
    assert cost.weight_s == pytest.approx(4 * (linears + 2 * 2 * weight) / 1e9), "gradients are read and written"


def test_the_overhead_counts_once_for_each_operator() -> None:
    cost = RooflineCosts().layer_cost(LayerQuery(block_graph(), PLACE, kind(flops=1e30, overhead_s=1.0), "float32"))
    assert (cost.forward_s, cost.input_s, cost.weight_s) == pytest.approx((4.0, 4.0, 2.0))


def test_no_gradient_flows_into_tokens() -> None:
    cost = RooflineCosts().layer_cost(LayerQuery(embed_graph(), PLACE, kind(overhead_s=1.0), "float32"))
    assert (cost.forward_s, cost.input_s, cost.weight_s) == pytest.approx((1.0, 0.0, 1.0), abs=1e-6)


def test_full_recomputation_adds_the_forward_and_keeps_only_the_input() -> None:
    roofline = RooflineCosts()
    none = roofline.layer_cost(LayerQuery(block_graph(), PLACE, kind(overhead_s=1e-6), "float32"))
    full = roofline.layer_cost(LayerQuery(block_graph(), PLACE, kind(overhead_s=1e-6), "float32", "full"))
    assert full.input_s == pytest.approx(none.input_s + none.forward_s)
    assert (full.forward_s, full.weight_s) == (none.forward_s, none.weight_s)
    assert full.saved_bytes == 4 * ROWS * TOKENS * WIDTH
    assert none.saved_bytes == 4 * ROWS * TOKENS * (WIDTH + 2 * INNER), "x, h for silu and its output for `down`"
    assert full.passing is not None and full.passing.fused >= none.saved_bytes
    assert full.passing.forward == 4 * ROWS * TOKENS * (WIDTH + 2 * INNER), "x, h and silu of h, then x and h and y"


def test_no_rows_cost_nothing() -> None:
    cost = RooflineCosts().layer_cost(
        LayerQuery(block_graph(), MicrobatchShape(0, TOKENS, 0, TOKENS), kind(), "float32")
    )
    assert cost.forward_s == cost.input_s == cost.weight_s == cost.saved_bytes == 0


def test_logits_count_in_the_precision_of_the_run() -> None:
    cost = RooflineCosts().layer_cost(LayerQuery(loss_graph(), PLACE, kind(), "bfloat16"))
    assert cost.saved_bytes >= 2 * ROWS * TOKENS * VOCABULARY


@pytest.mark.parametrize(("precision", "per_element"), [("bfloat16", 2 + 4 + 12), ("float32", 16), ("float64", 32)])
def test_bytes_per_parameter(precision: str, per_element: int) -> None:
    parts = static_parts(1000, 0, 1.0, precision, ADAMW)  # type: ignore[arg-type]
    assert sum(parts.values()) - WORKSPACE_BYTES == 1000 * per_element


def test_zero_splits_the_state_and_nothing_else() -> None:
    whole, split = static_parts(1000, 10, 1.0, "bfloat16", ADAMW), static_parts(1000, 10, 0.25, "bfloat16", ADAMW)
    assert split["optimizer"] == whole["optimizer"] / 4 == 3000
    assert split["parameters"] == whole["parameters"] == 2020, "frozen ones are stored, without gradient or state"
    assert split["gradients"] == whole["gradients"] == 4000
    assert optimizer_traffic_bytes(1000, 1.0, "bfloat16", ADAMW) == 1000 * (4 + 4 + 2 * 12 + 2)
    assert optimizer_traffic_bytes(1000, 0.25, "bfloat16", ADAMW) == 1000 * 4 + 250 * (4 + 2 * 12 + 2)


def table(decisions: ParallelConfig, *, tied: bool = False, batch: int = 12):  # type: ignore[no-untyped-def]
    context = PlannerContext(toy_model(4, tied=tied), toy_cluster(1, 8))
    parts = context.make_skeleton(Job(batch=batch, sequence=TOKENS), decisions)
    work = pipeline_work(parts, context.programs)
    return context, work, cost_table(work, context.network, context.layers)


def test_lane_parts_count_the_parameters_of_their_layers() -> None:
    _, work, costs = table(ParallelConfig(stages=2, cuts=(3,)))
    block = 2 * WIDTH * INNER
    elements = [VOCABULARY * WIDTH + 2 * block, 2 * block + VOCABULARY * WIDTH]
    for parts, count in zip(lane_parts(work), elements, strict=True):
        assert parts["parameters"] == parts["gradients"] == 4 * count
        assert parts["optimizer"] == 8 * count
    assert costs.static_bytes.tolist() == [16 * count + WORKSPACE_BYTES for count in elements]


def test_a_parameter_tied_within_a_stage_counts_once_and_across_stages_twice() -> None:
    shared = VOCABULARY * WIDTH
    _, one, _ = table(ParallelConfig(stages=1), tied=True)
    _, two, _ = table(ParallelConfig(stages=2, cuts=(3,)), tied=True)
    assert lane_parts(one)[0]["parameters"] == 4 * (shared + 8 * WIDTH * INNER)
    assert sum(parts["parameters"] for parts in lane_parts(two)) == 4 * (2 * shared + 8 * WIDTH * INNER)


def test_a_lane_is_as_slow_as_its_largest_replica() -> None:
    _, _, uneven = table(ParallelConfig(stages=2, cuts=(3,), replicas=(2, 1), microbatches=4))
    _, _, even = table(ParallelConfig(stages=2, cuts=(3,), replicas=(1,), microbatches=6))
    assert uneven.actions["F"].time_s == pytest.approx(even.actions["F"].time_s), "2 of 3 rows, and 2 of 2"


def test_slices_share_the_rows_and_later_ones_see_the_earlier() -> None:
    _, _, costs = table(ParallelConfig(stages=2, cuts=(3,), schedule="gpipe", slices=(10, 6)))
    assert costs.actions["F"].time_s.shape == (2, 1, 2)
    assert (costs.edges[0].forward_bytes[0] == 4 * 12 * WIDTH * np.array([10.0, 6.0])).all()


def test_b_is_i_and_w_together_and_memory_returns_to_zero() -> None:
    _, _, costs = table(ParallelConfig(stages=2, cuts=(3,)))
    actions = costs.actions
    assert actions["B"].time_s == pytest.approx(actions["I"].time_s + actions["W"].time_s)
    assert (actions["F"].held_bytes + actions["B"].held_bytes == 0).all()
    assert (actions["F"].held_bytes + actions["I"].held_bytes + actions["W"].held_bytes == 0).all()
    assert costs.overhead_s == ACTION_OVERHEAD_S


def test_reductions_and_gathers_go_over_the_replicas_of_the_stage() -> None:
    """Two replicas inside a host: a ring of two over the stage's gradients; under ZeRO-1 half of it and a gather."""
    context, work, plain = table(ParallelConfig(stages=2, cuts=(3,), replicas=(1, 1)))
    _, _, zero = table(ParallelConfig(stages=2, cuts=(3,), replicas=(1, 1), sharded_state="optimizer"))
    size = 4 * (VOCABULARY * WIDTH + 4 * WIDTH * INNER)
    link = context.cluster.links["inside"]
    one_pass = link.latency_s + size / 2 / link.bandwidth_bytes_per_s
    assert plain.reduce_s[0] == pytest.approx(2 * one_pass) and plain.gather_s[0] == 0
    assert zero.reduce_s[0] == pytest.approx(one_pass) and zero.gather_s[0] == pytest.approx(one_pass)
    assert len(work.stages) == 2


def test_stages_that_share_a_parameter_exchange_its_gradient() -> None:
    """Embedding and head on one device each: both send 4 bytes an element at once, one way each."""
    context, _, plain = table(ParallelConfig(stages=2, cuts=(3,)))
    _, _, tied = table(ParallelConfig(stages=2, cuts=(3,)), tied=True)
    link = context.cluster.links["inside"]
    exchange = link.latency_s + 4 * VOCABULARY * WIDTH / link.bandwidth_bytes_per_s
    assert plain.reduce_s.tolist() == [0.0, 0.0]
    assert tied.reduce_s == pytest.approx([exchange, exchange])


def test_every_number_says_where_it_came_from() -> None:
    _, _, costs = table(ParallelConfig(stages=1))
    notes = "\n".join(costs.notes)
    words = ("A100-80: data-sheet", "data-sheet peak", "efficiency 0.5 assumed", "latency", "AdamW")
    for word in words:
        assert word in notes


def test_a_network_knows_its_devices() -> None:
    network = Network(toy_cluster(2, 4))
    assert network.devices == 8 and network.host == (0,) * 4 + (1,) * 4
    assert Mesh(axes=(MeshAxis(name="replica", shares=(1,)),), devices=(0,)).size == 1
