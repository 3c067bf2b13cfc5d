"""What operators send each other, and that it is priced as it runs: one after the other, in the pass that does it."""

from __future__ import annotations

import pytest

from pipefit.cluster import parse_spec
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.cost.compute.shard_exchanges import operator_exchanges
from pipefit.model.graph import Graph, Operator, ParameterSpec, TensorSpec

SYMBOLS = {"B": 4, "T": 8, "P": 0, "S": 2, "R": 1}


def graph_of(*operators: Operator, tensors: tuple[TensorSpec, ...], parameters: tuple[ParameterSpec, ...]) -> Graph:
    return Graph(
        inputs=(TensorSpec(name="x", shape=("B", "T", 16)),),
        outputs=(operators[-1].outputs[0],),
        operators=operators,
        parameters=parameters,
        tensors=(*tensors, TensorSpec(name="y", shape=("B", "T", 12))),
    )


def gathered() -> Graph:
    """A weight of 12 x 16 of which this device stores 4 rows."""
    return graph_of(
        Operator(kind="unshard", inputs=("w",), outputs=("w.I",),
                 attributes={"dim": 0, "size": 12, "lowering": "grouped+alltoallv"}),
        Operator(kind="linear", inputs=("x", "w.I", ""), outputs=("y",)),
        tensors=(TensorSpec(name="w.I", shape=(12, 16)),),
        parameters=(ParameterSpec(name="w", shape=(4, 16)),),
    )  # fmt: skip


def plain() -> Graph:
    return graph_of(
        Operator(kind="linear", inputs=("x", "w", ""), outputs=("y",)),
        tensors=(),
        parameters=(ParameterSpec(name="w", shape=(12, 16)),),
    )


def test_a_gathered_weight_comes_twice_and_its_gradient_goes_once() -> None:
    graph = gathered()
    found = operator_exchanges(graph, graph.operators[0], SYMBOLS, "bfloat16")
    gather = ("all_gather", 2.0 * 12 * 16, "grouped", (12,))
    assert found == ((gather,), (gather,), (("reduce_scatter", 4.0 * 12 * 16, "alltoallv", (12,)),))


def test_factors_are_gathered_with_the_weight_gradient() -> None:
    attributes = {"dim": 0, "whole": "B", "lowering": "grouped+alltoallv"}
    operator = Operator(kind="linear_factors", inputs=("x", "w", ""), outputs=("y",), attributes=attributes)
    graph = Graph(
        inputs=(TensorSpec(name="x", shape=("R", "T", 16)),), outputs=("y",), operators=(operator,),
        parameters=(ParameterSpec(name="w", shape=(12, 16)),), tensors=(TensorSpec(name="y", shape=("R", "T", 12)),),
    )  # fmt: skip
    found = operator_exchanges(graph, operator, SYMBOLS, "float32")
    assert found.forward == found.input_gradient == ()
    assert found.weight_gradient == (
        ("all_gather", 4.0 * 4 * 8 * 16, "grouped", (4,)), ("all_gather", 4.0 * 4 * 8 * 12, "alltoallv", (4,)),
    )  # fmt: skip


def test_blocking_gathers_add_their_whole_time() -> None:
    """The runtime waits for each: nothing of a gather is hidden behind computing."""
    kind, place = parse_spec("1xA100-80").kinds["A100-80"], MicrobatchShape(4, 8, 0, 2, own_rows=1)
    said: list[tuple[str, float]] = []

    def collective(name: str, total_bytes: float, how: str = "padded", units: tuple[int, ...] = ()) -> float:
        said.append((name, total_bytes))
        return {"all_gather": 1.0, "reduce_scatter": 100.0}[name]

    one, two = (
        RooflineCosts().layer_cost(LayerQuery(graph, place, kind, "float32", "none", collective, "here"))
        for graph in (plain(), gathered())
    )
    assert two.forward_s - one.forward_s == pytest.approx(1.0, abs=1e-6)
    assert two.input_s - one.input_s == pytest.approx(1.0, abs=1e-6)
    assert two.weight_s - one.weight_s == pytest.approx(100.0, abs=1e-6)
    assert {size for _, size in said} == {4.0 * 12 * 16}
