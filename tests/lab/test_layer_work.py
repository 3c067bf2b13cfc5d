"""The work of a layer on an emulated device that holds a part of each sequence."""

from __future__ import annotations

import pytest
from tests.support import worker_plans as plans

from pipefit.cost.pipeline.context_traffic import context_symbols
from pipefit.lab.layer_work import exchange_count, layer_facts

GRAPH = next(
    graph for graph in plans.model("llama").graphs.values() if any(op.kind == "attention" for op in graph.operators)
)
COMPLETE = {"B": 2, "T": 64, "P": 0, "S": 64}
PART = {"B": 2, "T": 16, "P": 0, "S": 16, **dict(context_symbols(4))}


@pytest.mark.parametrize("kind", ["F", "I", "W"])
def test_four_parts_do_the_work_of_a_sequence(kind: str) -> None:
    complete, part = (layer_facts(GRAPH, sizes)[kind] for sizes in (COMPLETE, PART))
    assert 4 * part.attention_flops == complete.attention_flops
    assert 4 * part.dense_flops == complete.dense_flops
    assert (part.context, part.masked) == (complete.context, complete.masked)


@pytest.mark.parametrize(("recompute", "counts"), [("none", (2, 4, 0, 4)), ("full", (2, 6, 0, 6))])
def test_collectives_are_gathers_and_sums(recompute: str, counts: tuple[int, ...]) -> None:
    assert tuple(exchange_count(GRAPH, kind, PART, recompute) for kind in "FIWB") == counts
    assert all(exchange_count(GRAPH, kind, COMPLETE, recompute) == 0 for kind in "FIWB")
