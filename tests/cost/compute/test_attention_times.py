"""Times of causal attention by the roofline: uncut, in slices, on the devices of a shard axis, and as searched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.cost.compute.test_roofline import kind
from tests.model.ops.test_attention_work import SLICINGS, visible_pairs

from pipefit.cluster import parse_spec
from pipefit.cluster.types import DeviceKind
from pipefit.cost.compute.curves import attention_features
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.operator_times import free_collective
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.model.analysis.saved import Recompute
from pipefit.model.graph import Graph, Model, Operator, ParameterSpec, TensorSpec
from pipefit.model.ops.attention import DOCUMENTS_APART
from pipefit.model.registry import open_model
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.shard.operator_work import OperatorPricing
from pipefit.shard.rules import labels_of
from pipefit.shard.setting import ShardSetting

HEADS, FEATURES = 4, 8
PAIR_FLOPS = 2 * HEADS * FEATURES
"FLOPs of one product for one pair of a query and a key, over all heads."


def attending_graph(queries: str | int = "T", cut: list[object] | None = None, window: int | None = None) -> Graph:
    """Attention of `queries` tokens to T keys."""
    attributes = {"causal": True, "scale": 0.5, "window": window, **({"cut": cut} if cut else {})}
    q, k = (TensorSpec(name=name, shape=("B", size, HEADS, FEATURES)) for name, size in (("q", queries), ("k", "T")))
    return Graph(
        inputs=(q, k),
        outputs=("o",),
        operators=(Operator(kind="attention", inputs=("q", "k", "k"), outputs=("o",), attributes=attributes),),
        parameters=(),
        tensors=(replace(q, name="o"),),
    )


def attention_s(graph: Graph, shape: MicrobatchShape, recompute: Recompute = "none") -> tuple[float, float]:
    """Forward and backward at 0.5e12 FLOP/s, nothing else taking time."""
    cost = RooflineCosts().layer_cost(LayerQuery(graph, shape, kind(), "float32", recompute, free_collective, "free"))
    return cost.forward_s, cost.backward_s


def slice_shapes(slices: tuple[int, ...], rows: int = 1) -> list[MicrobatchShape]:
    past = [sum(slices[:index]) for index in range(len(slices))]
    return [
        MicrobatchShape(rows, tokens, before, tokens, index, rows, sum(slices) - before - tokens)
        for index, (tokens, before) in enumerate(zip(slices, past, strict=True))
    ]


@pytest.mark.parametrize("slices", SLICINGS)
def test_slices_take_the_time_of_the_pairs_that_are_visible(slices: tuple[int, ...]) -> None:
    times = [attention_s(attending_graph(), shape) for shape in slice_shapes(slices, rows=3)]
    forward_s, backward_s = (sum(column) for column in zip(*times, strict=True))
    assert forward_s == pytest.approx(2 * 3 * PAIR_FLOPS * visible_pairs(24) / 0.5e12)
    assert backward_s == pytest.approx(2.5 * forward_s), "four products, and the scores once more"


def test_documents_apart_take_the_time_of_all_pairs() -> None:
    """Their kernels have a mask, under which hidden keys are computed, too."""
    symbols = ((DOCUMENTS_APART, 1),)
    forward_s = attention_s(attending_graph(), MicrobatchShape(1, 24, 0, 24, symbols=symbols))[0]
    assert forward_s == pytest.approx(2 * PAIR_FLOPS * 24 * 24 / 0.5e12)
    forward_s = attention_s(attending_graph(), MicrobatchShape(1, 8, 16, 8, 2, symbols=symbols))[0]
    assert forward_s == pytest.approx(2 * PAIR_FLOPS * 8 * 24 / 0.5e12)


def test_parts_of_the_queries_share_the_pairs_and_the_last_one_is_slowest() -> None:
    graph = attending_graph("S", [1, -1, "T"])
    shapes = [MicrobatchShape(1, 24, 0, 6, own_first=first) for first in (0, 6, 12, 18)]
    times = [attention_s(graph, shape)[0] for shape in shapes]
    assert sum(times) == pytest.approx(2 * PAIR_FLOPS * visible_pairs(24) / 0.5e12)
    assert times == sorted(times) and times[-1] > times[0]
    roofline = RooflineCosts()  # one cache for all: parts at other tokens are not confused
    again = [
        roofline.layer_cost(LayerQuery(graph, shape, kind(), "float32", "none", free_collective, "free")).forward_s
        for shape in (*shapes, shapes[0]._replace(own_first=None))
    ]
    assert again == [*times, times[-1]]


def test_a_search_prices_equal_parts_as_they_take() -> None:
    """Of a kind of device, those of its last one."""
    graph, devices = attending_graph(), 4
    kinds = (kind(), kind(), replace(kind(), name="last"), kind())
    setting = ShardSetting(
        kinds=kinds, collective=free_collective, rows=1, tokens=24, precision="float32", microbatches=1
    )
    tensors = {tensor.name: tensor for tensor in (*graph.inputs, *graph.tensors)}
    parameters: dict[str, ParameterSpec] = {}
    pricing = OperatorPricing(setting, {name: tensor.shape for name, tensor in tensors.items()}, tensors, parameters)
    operator = graph.operators[0]
    labelled = labels_of(operator, tuple(tensors[name].shape for name in operator.inputs), (tensors["o"].shape,))

    def split_s(label: str) -> list[float]:
        forward, part = pricing.pass_lines(operator, labelled, label)[0], 1 / devices if label else 1.0
        return [max(constant + slope * part for constant, slope in lines) for lines in forward]

    whole_s = attention_s(graph, MicrobatchShape(1, 24, 0, 24))[0]
    parts_s = [
        attention_s(attending_graph("S", [1, -1, "T"]), MicrobatchShape(1, 24, 0, 6, own_first=first))[0]
        for first in (18, 12)
    ]
    assert split_s("") == pytest.approx([whole_s] * 2)
    assert split_s("d1") == pytest.approx(parts_s)
    assert split_s("d0") == pytest.approx([whole_s / devices] * 2)
    assert split_s("heads") == pytest.approx([whole_s / devices] * 2)


def test_measured_curves_count_the_same_work() -> None:
    """Their features are rows x length^2 / 2 and rows x length x context; the diagonal is half a pair a query more."""
    for tokens, past in ((24, 0), (8, 16), (6, 18)):
        features = attention_features([2], [tokens], [past])[0]
        square, rectangle = features[0] + features[5], features[4]
        forward_s = attention_s(attending_graph(), MicrobatchShape(2, tokens, past, tokens))[0]
        assert forward_s == pytest.approx(2 * PAIR_FLOPS * (square + rectangle + 2 * tokens / 2) / 0.5e12)


@pytest.fixture(scope="module")
def llama() -> Model:
    return open_model("llama-3-8b")


def lane_s(model: Model, slices: tuple[int, ...], device: DeviceKind, recompute: Recompute) -> float:
    """One sequence through all layers of a model on one device, forward and backward."""
    roofline = RooflineCosts()
    costs = (
        roofline.layer_cost(LayerQuery(model.layer_graph(layer), shape, device, "bfloat16", recompute))
        for shape in slice_shapes(slices)
        for layer in model.layers
    )
    return sum(cost.forward_s + cost.backward_s for cost in costs)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_slices_of_a_long_sequence_are_no_faster_on_one_lane(llama: Model, recompute: Recompute) -> None:
    """Llama-3-8B, 8,192 tokens on an H100; priced as a square, three slices were 5 % faster than none."""
    device = parse_spec("1xH100").kinds["H100"]
    whole_s = lane_s(llama, (8192,), device, recompute)
    for slices in ((4096, 4096), (2731, 2731, 2730), (3072, 2688, 2432)):
        assert whole_s <= lane_s(llama, slices, device, recompute) < (0.95 + 0.05 * len(slices)) * whole_s
    assert whole_s <= lane_s(llama, (1024,) * 8, device, recompute) < 1.35 * whole_s
    if recompute == "none":
        assert whole_s == pytest.approx(1.069, rel=0.01)


def test_a_plan_with_documents_apart_counts_hidden_keys() -> None:
    model, cluster = open_model("tiny-llama"), parse_spec("2xA100-80")
    kinds = {name: replace(device, peak_flops_per_s={"float32": 1e10}) for name, device in cluster.kinds.items()}
    cluster = replace(cluster, kinds=kinds)
    joined_s, apart_s = (
        simulate_plan(
            build_plan(
                model,
                cluster,
                Job(batch=2, sequence=512, documents=documents),
                ParallelConfig(stages=2, microbatches=2),
            ),
            model,
            cluster,
        ).timeline.makespan_s
        for documents in ("joined", "apart")
    )
    assert 1.05 < apart_s / joined_s < 2
