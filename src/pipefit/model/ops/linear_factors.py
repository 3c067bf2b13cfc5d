"""linear_factors: a linear layer on a part of the rows or tokens, with the complete weight gradient on every device.

In every microbatch the two factors of the gradient, x and the gradient of the output, are all-gathered, and every
device multiplies the full factors. The gradient is therefore equal on all devices and needs no reduction. This pays for
wide layers with few rows (sufficient-factor broadcasting: Xie et al., 2016; Poseidon, Zhang et al., 2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.graph import Graph, Operator, Shape, size_value
from pipefit.model.ops.exchange import lowering_of
from pipefit.model.ops.kind import Flops, InternalCollectives, OperatorCall, OperatorKind

KIND = "linear_factors"


def reduced_nowhere(graph: Graph) -> frozenset[str]:
    """Parameters of one device's graph whose full gradient is computed on every device of the shard axis."""
    users = [operator for operator in graph.operators if operator.kind == KIND]
    return frozenset(name for operator in users for name in operator.inputs[1:] if name)


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    x, weight = inputs[0], inputs[1]
    assert x is not None and weight is not None
    return ((*x[:-1], weight[0]),)


def _split_factor(call: OperatorCall) -> float:
    """Full size of the split dimension divided by this device's part."""
    x, dim = call.inputs[0], call.attributes["dim"]
    assert x is not None
    return float(size_value(call.attributes["whole"], call.symbols) / max(1, x[dim]))


def _count_flops(call: OperatorCall) -> Flops:
    x, weight = call.inputs[0], call.inputs[1]
    assert x is not None and weight is not None
    product = 2 * math.prod(x) * weight[0]
    return Flops(product, product, round(product * _split_factor(call)))


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return operator.inputs[:1] if needs_gradient(operator.inputs[1]) else ()


def _factors_bytes(call: OperatorCall) -> int:
    """Bytes of both gathered factors."""
    x = call.inputs[0]
    assert x is not None
    return round((math.prod(x) + math.prod(call.outputs[0])) * _split_factor(call)) * call.compute_bytes


def _widened_bytes(call: OperatorCall) -> int:
    return _factors_bytes(call) // call.compute_bytes * call.wide_bytes


def _inner_collectives(call: OperatorCall) -> InternalCollectives:
    x = call.inputs[0]
    assert x is not None
    forward_lowering, backward_lowering = lowering_of(
        Operator(kind=KIND, inputs=(), outputs=(), attributes=call.attributes)
    )
    units = (size_value(call.attributes["whole"], call.symbols),)
    sizes = (math.prod(x) * _split_factor(call), math.prod(call.outputs[0]) * _split_factor(call))
    gathers = zip(sizes, (forward_lowering, backward_lowering), strict=True)
    return InternalCollectives(
        weight_gradient=tuple(("all_gather", size * call.compute_bytes, lowering, units) for size, lowering in gathers)
    )


OPERATORS = (
    OperatorKind(
        kind=KIND,
        summary="linear on a part of the rows or tokens; the factors of the weight's gradient are gathered.",
        inputs=("x", "weight", "bias?"),
        attributes={"dim": "the dimension of x that is split", "whole": "its size over all devices"},
        shapes=_output_shapes,
        flops=_count_flops,
        saves=_saved_values,
        talks=_inner_collectives,
        pending_values=(0,),
        pending_gradients=True,
        backward_extra=_factors_bytes,
        deferred_extra=_factors_bytes,
        widened_bytes=_widened_bytes,
        boundary=True,
        heavy=True,
        is_product=True,
        measured_as="linear",
    ),
)
