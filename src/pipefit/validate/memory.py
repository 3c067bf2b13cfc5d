"""Activation memory of Megatron-LM: this project's saved tensors of a layer, plus the additional ones of that
framework.

Korthikanti et al., arXiv 2205.05198, sections 3 to 5. This project's `kept_values` lists the saved values. Megatron-LM
also saves the mask of every dropout (one byte an element; this runtime regenerates masks). If attention is not fused,
it saves the softmax of the scores and its dropout as well. An input that was gathered for a matrix product is saved as
this device's shard and gathered again. Statistics of norms are not counted, as in the paper's formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pipefit.model.analysis.saved import kept_values
from pipefit.model.graph import Graph, element_count

Scores = Literal["made again", "softmax", "softmax and dropout"]
"""Attention scores saved for the backward pass."""


def kept_bytes(
    graph: Graph, symbols: Mapping[str, int], width: int, scores: Scores = "made again", full: bool = False
) -> int:
    """Return the saved bytes of one layer and microbatch on one device; `full` saves only the layer's input."""
    if full:
        return sum(_tensor_bytes(graph, name, symbols, width) for name in kept_values(graph, "full", width).values)
    gathered = {op.outputs[0]: op.inputs[0] for op in graph.operators if op.kind == "all_gather"}
    total = sum(
        _tensor_bytes(graph, gathered.get(name, name), symbols, width)
        for name in kept_values(graph, "none", width).values
    )
    for operator in graph.operators:
        if operator.kind == "dropout":
            total += element_count(graph.find_tensor(operator.outputs[0]).shape, symbols)
        if operator.kind == "attention" and scores != "made again":
            rows, tokens, heads, _ = (
                element_count((size,), symbols) for size in graph.find_tensor(operator.inputs[0]).shape
            )
            bytes_per_score = width if scores == "softmax" else 2 * width + 1  # dropout: mask and result
            total += rows * heads * tokens * tokens * bytes_per_score
    return total


def matrix_elements(graph: Graph) -> int:
    """Return the elements of the weight matrices, the parameter count of the paper's formulas."""
    return sum(element_count(spec.shape, {}) for spec in graph.parameters if len(spec.shape) == 2)


def _tensor_bytes(graph: Graph, name: str, symbols: Mapping[str, int], width: int) -> int:
    return element_count(graph.find_tensor(name).shape, symbols) * width
