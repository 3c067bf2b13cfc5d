"""What Megatron-LM keeps of a layer for its backward pass: this project's rules, and what that framework does besides.

Korthikanti et al., arXiv 2205.05198, sections 3 to 5. This project's `kept_values` names the values. On top of them
that framework keeps the mask of every dropout (one byte an element; this runtime draws masks again), and, where
attention is not fused, the softmax of the scores with its dropout. An input that was gathered for a matrix product is
kept as this device's shard and gathered again. Statistics of norms are not counted, as in the paper's formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pipefit.model.analysis.saved import kept_values
from pipefit.model.graph import Graph, element_count

Scores = Literal["made again", "softmax", "softmax and dropout"]
"""What is kept of the attention's scores."""


def kept_bytes(
    graph: Graph, symbols: Mapping[str, int], width: int, scores: Scores = "made again", full: bool = False
) -> int:
    """Bytes of one layer and microbatch on one device; `full` keeps the layer's input alone."""
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
            each = width if scores == "softmax" else 2 * width + 1  # dropout: its mask and its result
            total += rows * heads * tokens * tokens * each
    return total


def matrix_elements(graph: Graph) -> int:
    """Elements of the weight matrices alone: what the paper's formulas count as parameters."""
    return sum(element_count(spec.shape, {}) for spec in graph.parameters if len(spec.shape) == 2)


def _tensor_bytes(graph: Graph, name: str, symbols: Mapping[str, int], width: int) -> int:
    return element_count(graph.find_tensor(name).shape, symbols) * width
