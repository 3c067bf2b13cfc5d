"""What is kept by what was read: the same answers as working everything out anew, and each worked out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
from tests.cost.compute.test_roofline import kind
from tests.support.plan_toys import block_graph

from pipefit.cost.compute import operator_times
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.roofline import RooflineCosts
from pipefit.cost.compute.symbol_memo import SymbolMemo
from pipefit.model.graph import Graph, Operator, TensorSpec


def test_an_answer_is_worked_out_once_for_all_it_reads() -> None:
    asked: list[tuple[int, int]] = []

    def rows_or_all(symbols: Mapping[str, int]) -> int:
        """What comes before counts for many rows only."""
        asked.append((symbols["B"], symbols.get("P", 0) if symbols["B"] > 2 else -1))
        return 10 * asked[-1][0] + asked[-1][1]

    kept: SymbolMemo[int] = SymbolMemo()
    for _, rows, past in product(range(2), (1, 3), (5, 6)):
        expected = 10 * rows + (past if rows > 2 else -1)
        assert kept.get_or_compute({"B": rows, "T": 7, "P": past}, rows_or_all) == expected
    assert asked == [(1, -1), (3, 5), (3, 6)]


def test_who_goes_through_all_sizes_has_read_them_all() -> None:
    kept: SymbolMemo[int] = SymbolMemo()
    answers = [kept.get_or_compute({"B": 1, "P": past}, lambda symbols: sum({**symbols}.values())) for past in (1, 2)]
    assert answers == [2, 3]


def attending_graph() -> Graph:
    """One head-wise attention of x to itself, and a pointwise operator behind it."""
    shape = ("B", "T", 2, 4)
    return Graph(
        inputs=(TensorSpec(name="x", shape=shape),),
        outputs=("y",),
        operators=(
            Operator(
                kind="attention",
                inputs=("x", "x", "x"),
                outputs=("o",),
                attributes={"causal": True, "scale": 0.5, "window": None},
            ),
            Operator(kind="silu", inputs=("o",), outputs=("y",)),
        ),
        parameters=(),
        tensors=(TensorSpec(name="o", shape=shape), TensorSpec(name="y", shape=shape)),
    )


def test_one_roofline_answers_for_all_places_as_one_of_its_own_does_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    device = kind(bandwidth=1e10, overhead_s=1e-6)
    kinds = [device, replace(device, name="slow", memory_bandwidth_bytes_per_s=1e9)]
    graphs = [attending_graph(), block_graph()]
    shapes = [
        MicrobatchShape(rows, tokens, past, tokens, earlier, later=later)
        for rows, tokens, (past, earlier), later in product((1, 2), (16, 32), ((0, 0), (16, 1), (48, 2)), (0, 8))
    ]
    queries = [
        LayerQuery(graph, shape, kind, "bfloat16", recompute)
        for graph, shape, kind, recompute in product(graphs, shapes, kinds, ("none", "full"))
    ]
    alone = [RooflineCosts().layer_cost(query) for query in queries]
    worked: Counter[str] = Counter()
    work = operator_times.operator_work

    def counted(graph: Graph, operator: Operator, *rest: object) -> object:
        worked[operator.kind] += 1
        return work(graph, operator, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(operator_times, "operator_work", counted)
    together = RooflineCosts()
    assert [together.layer_cost(query) for query in queries] == alone
    sizes = 2 * 2  # rows, tokens
    assert worked == {"attention": 3 * sizes * len(kinds), "silu": 2 * sizes * len(kinds)} | {
        "linear": 2 * sizes * len(kinds),
        "add": sizes * len(kinds),
    }
