"""Matrix products that run in FP8: the linear layers of blocks, as torchtitan and Transformer Engine choose them.

A block hands on an activation of the shape that it takes. The embedding, the head and products of attention stay in
bfloat16. FP8 kernels need sizes that are multiples of 16.
"""

from __future__ import annotations

from pipefit.model.graph import Graph, Operator
from pipefit.model.ops import KINDS
from pipefit.model.ops.unshard import stored_weights
from pipefit.precision import NARROW, Precision

MULTIPLE = 16
"""Sizes of FP8 matrices are multiples of this (cuBLASLt, torch._scaled_mm)."""

QUANTIZED_BYTES = 5
"""Bytes that move for one element of a factor of 16 bits: read for its largest value, read again, written as FP8."""


def has_narrow_product(graph: Graph, operator: Operator) -> bool:
    """Return whether an operator of a layer runs in FP8 under `--precision fp8`."""
    weights = stored_weights(graph)
    if not KINDS[operator.kind].is_product or operator.inputs[1] not in weights or not _is_block(graph):
        return False
    return all(size % MULTIPLE == 0 for size in weights[operator.inputs[1]].shape)


def narrow_outputs(graph: Graph, precision: Precision) -> frozenset[str]:
    """Return the outputs of the operators that run in FP8; none, unless the precision has such products."""
    if precision not in NARROW:
        return frozenset()
    return frozenset(operator.outputs[0] for operator in graph.operators if has_narrow_product(graph, operator))


def _is_block(graph: Graph) -> bool:
    hidden, result = graph.hidden_input, graph.hidden_output
    if hidden is None or result is None:
        return False
    return graph.find_tensor(hidden).shape == graph.find_tensor(result).shape
