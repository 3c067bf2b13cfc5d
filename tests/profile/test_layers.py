"""Timing layers: what is run, what counts, and which points are visited again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import worker_plans as plans

from pipefit.cluster import parse_spec
from pipefit.cost.compute.curves import FEATURES
from pipefit.model.graph import Graph, Operator, ParameterSpec, TensorSpec
from pipefit.precision import TENSOR_TYPE
from pipefit.profile.calibrate import add_ratios, fit_efficiency
from pipefit.profile.facts import LAYER_DTYPES
from pipefit.profile.layer_phase import distinct_layers, layer_curve
from pipefit.profile.layers import (
    PROFILED_ACTIONS,
    LayerBench,
    PointSamples,
    ProfiledLayer,
    Visit,
    action_overhead,
    feasible_points,
    survey_points,
    typical_times,
    undisturbed_times,
    unsettled_points,
)
from pipefit.profile.points import WorkPoint, first_points
from pipefit.run.ops import linear
from pipefit.run.stage.products import use_product_type

CPU = torch.device("cpu")


def attention_layer(width: int = 32) -> Graph:
    heads = ("B", "T", 2, width // 2)
    return Graph(
        inputs=(
            TensorSpec(name="x", shape=("B", "T", width)),
            TensorSpec(name="positions", shape=("B", "T"), dtype="int64", role="positions"),
        ),
        outputs=("y",),
        operators=(
            Operator(kind="linear", inputs=("x", "w", ""), outputs=("h",)),
            Operator(kind="reshape", inputs=("h",), outputs=("r",), attributes={"shape": list(heads)}),
            Operator(
                kind="rotary",
                inputs=("r", "positions"),
                outputs=("q",),
                attributes={"theta": 1e4, "dim": width // 2, "scaling": None, "style": "half"},
            ),
            Operator(
                kind="attention",
                inputs=("q", "q", "r"),
                outputs=("o",),
                attributes={"causal": True, "scale": 0.25, "window": None},
            ),
            Operator(kind="reshape", inputs=("o",), outputs=("y",), attributes={"shape": ["B", "T", width]}),
        ),
        parameters=(ParameterSpec(name="w", shape=(width, width)),),
        tensors=(
            TensorSpec(name="h", shape=("B", "T", width)),
            *(TensorSpec(name=name, shape=heads) for name in "rqo"),
            TensorSpec(name="y", shape=("B", "T", width)),
        ),
    )


def loss_layer() -> Graph:
    return Graph(
        inputs=(
            TensorSpec(name="x", shape=("B", "T", 19)),
            TensorSpec(name="labels", shape=("B", "T"), dtype="int64", role="labels"),
        ),
        outputs=("loss",),
        operators=(
            Operator(
                kind="cross_entropy", inputs=("x", "labels"), outputs=("loss",), attributes={"ignore_index": -100}
            ),
        ),
        parameters=(),
        tensors=(TensorSpec(name="loss", shape=(), dtype="float32"),),
    )


def embedding_layer() -> Graph:
    return Graph(
        inputs=(TensorSpec(name="tokens", shape=("B", "T"), dtype="int64", role="tokens"),),
        outputs=("y",),
        operators=(Operator(kind="embedding", inputs=("tokens", "w"), outputs=("y",)),),
        parameters=(ParameterSpec(name="w", shape=(17, 8)),),
        tensors=(TensorSpec(name="y", shape=("B", "T", 8)),),
    )


@pytest.mark.parametrize("graph", [attention_layer(), loss_layer(), embedding_layer()], ids=["block", "loss", "embed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_layer_is_timed_at_every_point(graph: Graph, dtype: str) -> None:
    bench = LayerBench(ProfiledLayer(graph, "toy", dtype), CPU)
    for point in (WorkPoint(1, 16), WorkPoint(3, 5), WorkPoint(2, 8, 24)):
        visit = bench.visit_point(point, window_s=0.0)
        assert {action: len(calls) for action, calls in visit.items()} == {"F": 2, "B": 1, "I": 1, "W": 1}
        assert all(wall > 0 and own >= 0 for calls in visit.values() for wall, own in calls)
    assert len(bench.visit_point(WorkPoint(1, 16), window_s=0.2)["B"]) > 1


@pytest.mark.parametrize("dtype", LAYER_DTYPES)
def test_layers_are_timed_in_the_number_type_of_their_products(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of a family, whose linear layers run in FP8 if that is the type: seven forward, seven times two back."""
    products: list[torch.Size] = []
    scaled_product = linear.scaled_product

    def counted_product(left: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        products.append(left.shape)
        return scaled_product(left, *arguments, **options)

    monkeypatch.setattr(linear, "scaled_product", counted_product)
    model = plans.model("llama")
    block = next(layer for layer in model.layers if layer.name == "layers.0")
    bench = LayerBench(ProfiledLayer(model.graphs[block.graph], "block", dtype), CPU)
    bench.visit_point(WorkPoint(1, 16), window_s=0.0)
    use_product_type("float32", CPU)
    assert bench.dtype == getattr(torch, TENSOR_TYPE[dtype])
    assert len(products) == (2 * 7 + 4 * 7 if dtype == "fp8" else 0), "F, B, F, I, W"


def test_context_makes_attention_cost_more() -> None:
    bench = LayerBench(ProfiledLayer(attention_layer(), "toy", "float32"), CPU)
    samples = [PointSamples(0, WorkPoint(4, 32, past)) for past in (16, 1024)]
    survey_points([bench], samples, 4, window_s=0.005)
    short, long = (typical_times(sample.visits)[0] for sample in samples)
    assert long["F"] > 1.5 * short["F"] and long["B"] > 1.5 * short["B"]


def test_a_context_in_many_slices_costs_more_than_in_one() -> None:
    """Attention goes through earlier slices one by one; the profile's points say how many there were."""
    bench = LayerBench(ProfiledLayer(attention_layer(), "toy", "float32"), CPU)
    samples = [PointSamples(0, WorkPoint(1, 16, 256, earlier)) for earlier in (1, 16)]
    survey_points([bench], samples, 4, window_s=0.005)
    one, many = (typical_times(sample.visits)[0] for sample in samples)
    assert many["F"] > 1.3 * one["F"] and many["B"] > 1.3 * one["B"]


def test_a_context_comes_in_slices_as_equal_as_they_can_be() -> None:
    assert WorkPoint(2, 8, 24, 3).earlier_slices == (8, 8, 8) and WorkPoint(2, 8, 25, 3).earlier_slices == (8, 8, 9)
    assert WorkPoint(1, 8, 2, 5).earlier_slices == (1, 1) and WorkPoint(1, 8).earlier_slices == ()


def test_a_visit_leaves_nothing_of_the_earlier_slices_behind() -> None:
    bench = LayerBench(ProfiledLayer(attention_layer(), "toy", "float32"), CPU)
    for earlier in (3, 2):
        bench.visit_point(WorkPoint(2, 8, 24, earlier), window_s=0.0)
        program = bench._stage_program(sliced=True)
        assert not program._records and not program._past


def visit(*calls: tuple[float, float]) -> Visit:
    return dict.fromkeys(PROFILED_ACTIONS, calls)


def test_time_that_other_work_took_does_not_count() -> None:
    visits = [visit((1.0, 1.0), (9.0, 1.02), (1.04, 1.04)), visit((3.0, 1.2)), visit((1.5, 1.5))]
    assert undisturbed_times(visits, "F") == [1.02, 1.2, 1.5]
    seconds, spread = typical_times(visits)
    assert seconds["F"] == 1.02 and spread["F"] == pytest.approx(0.48 / 1.02)


def test_our_own_processes_on_a_core_take_turns() -> None:
    visits = [visit((2.0, 1.0), (4.0, 1.0)), visit((5.0, 1.1))]
    assert typical_times(visits, crowding=1.5)[0]["F"] == 1.5


def test_points_that_do_not_come_out_the_same_twice_are_visited_again() -> None:
    steady = PointSamples(0, WorkPoint(1, 1), [visit((1.0, 1.0)), visit((1.01, 1.01))])
    shaky = PointSamples(0, WorkPoint(1, 2), [visit((1.0, 1.0)), visit((1.5, 1.5))])
    once = PointSamples(0, WorkPoint(1, 3), [visit((1.0, 1.0))])
    assert unsettled_points([steady, shaky, once]) == [1, 2]
    bench = LayerBench(ProfiledLayer(loss_layer(), "toy", "float32"), CPU)
    samples = [PointSamples(0, WorkPoint(1, 4)), PointSamples(0, WorkPoint(1, 8))]
    met: list[int] = []
    survey_points([bench], samples, 1, window_s=0.0, again=2, sync=lambda: met.append(1), agree=lambda places: [1])
    assert [len(sample.visits) for sample in samples] == [1, 3]
    assert len(met) == 4


def test_points_that_do_not_fit_in_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[WorkPoint] = []

    def visit(self: LayerBench, point: WorkPoint, window_s: float) -> Visit:
        tried.append(point)
        if point.rows * point.tokens > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {}

    monkeypatch.setattr(LayerBench, "visit_point", visit)
    bench = LayerBench(ProfiledLayer(loss_layer(), "toy", "float32"), CPU)
    samples = [PointSamples(0, WorkPoint(1, tokens)) for tokens in (256, 16, 128, 64)]
    assert [sample.point.tokens for sample in feasible_points([bench], samples)] == [16, 64]
    assert [point.tokens for point in tried] == [16, 64, 128], "256 is not tried after 128"

    def broken(self: LayerBench, point: WorkPoint, window_s: float) -> Visit:
        raise RuntimeError("a bug")

    monkeypatch.setattr(LayerBench, "visit_point", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        feasible_points([bench], samples)


def test_overhead_is_that_of_an_action_not_of_a_layer() -> None:
    found = action_overhead("float32", CPU, rounds=3)
    assert set(found) == set(PROFILED_ACTIONS)
    tiny = LayerBench(ProfiledLayer(attention_layer(), "toy", "float32"), CPU)
    sample = PointSamples(0, WorkPoint(1, 1))
    survey_points([tiny], [sample], 3, window_s=0.005)
    whole = typical_times(sample.visits)[0]
    assert all(0 <= found[action] < whole[action] for action in ("F", "B", "I")), (found, whole)


def test_a_curve_of_a_real_layer_goes_through_its_points() -> None:
    subject = ProfiledLayer(attention_layer(), "toy", "float32")
    bench = LayerBench(subject, CPU)
    samples = [PointSamples(0, point) for point in first_points(subject.graph, 64, 256)]
    survey_points([bench], samples, 3, window_s=0.003)
    costs = action_overhead("float32", CPU, rounds=2)
    curve = layer_curve(subject, samples, "cpu", costs, 1)
    assert len(curve.points) == len(samples) < 40
    assert curve.setting == "alone" and curve.actions["F"].time_s[-1] > curve.actions["F"].time_s[0]
    assert len(curve.actions["F"].attention_s) == len(FEATURES) and curve.fit_error < 1.0
    assert layer_curve(subject, samples, "cpu", costs, 3, 1.5).setting == "together"


def test_distinct_layers_of_a_model_are_found_once() -> None:
    found, skipped = distinct_layers(["tiny-llama", "tiny-llama"], "float32")
    assert [subject.name for subject in found] == [
        "embed of tiny-llama",
        "layers.0 of tiny-llama",
        "head of tiny-llama",
        "loss of tiny-llama",
    ]
    assert skipped == []


def test_every_layer_of_a_multimodal_model_is_measured() -> None:
    """What meets images (`I`, `L`) has sizes of them, and is compared with a roofline of the same sizes. Layers of
    images are measured at several lengths of images, so that attention within them is told from the rest."""
    subjects, skipped = distinct_layers(("multimodal-tiny",), "float32")
    assert not skipped and len(subjects) == 9
    curves = []
    for subject in subjects:
        bench, attends = LayerBench(subject, CPU), "layers.0" in subject.name
        samples = [PointSamples(index, point) for index, point in enumerate(first_points(subject.graph, 64, 128))]
        for sample in samples:
            sample.visits.append(bench.visit_point(sample.point, 0.0))
        assert attends == (WorkPoint(2, 64) in {sample.point for sample in samples})
        curves.append(layer_curve(subject, samples, "cpu", {}, 1))
        assert all(bool(curve.attention_s) == attends for curve in curves[-1].actions.values())
        met = {
            name: bench._random_inputs(WorkPoint(2, 64), 0)[1].data.get(name)
            for name in ("image_places", "condition_places")
        }
        assert all(value is None or value.shape == (1, 32) for value in met.values())
    kind = replace(parse_spec("1xA100-80").kinds["A100-80"], name="cpu")
    graphs = [subject.graph for subject in subjects]
    assert 0 < fit_efficiency(kind, graphs, curves) <= 1
    head = next(curve for curve in add_ratios(kind, graphs, curves) if "head" in curve.name)
    assert head.against_roofline["F"] > 0
