"""The products that run in FP8: linear layers of blocks, in captured families and in the programs of shards."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support import worker_plans as plans

from pipefit.model.analysis.narrow_products import has_narrow_product
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Graph, Model
from pipefit.model.registry import describe_config


def captured(**changes: Any) -> Model:
    described = describe_config(plans.LLAMA | changes, "llama", "llama")
    return capture_family(described.family, described.config)


def narrow_count(graph: Graph) -> tuple[int, int]:
    """Return (products in FP8, linear layers)."""
    linear = [operator for operator in graph.operators if operator.kind in ("linear", "linear_factors")]
    return sum(has_narrow_product(graph, operator) for operator in linear), len(linear)


def test_blocks_run_in_fp8_and_the_head_does_not() -> None:
    model = captured()
    counts = {layer.name: narrow_count(model.graphs[layer.graph]) for layer in model.layers}
    assert counts["layers.0"] == (7, 7) and counts["head"] == (0, 1) and counts["embed"] == (0, 0)
    assert not any(
        has_narrow_product(model.graphs[layer.graph], operator)
        for layer in model.layers
        for operator in model.graphs[layer.graph].operators
        if operator.kind not in ("linear", "linear_factors")
    )


@pytest.mark.parametrize(("width", "narrow"), [(48, 7), (56, 4)])
def test_sizes_are_multiples_of_sixteen(width: int, narrow: int) -> None:
    model = captured(intermediate_size=width)
    block = next(layer for layer in model.layers if layer.name == "layers.0")
    assert narrow_count(model.graphs[block.graph]) == (narrow, 7)
