"""conv(x, weight, bias?): a convolution over the dimensions behind rows and channels (cross-correlation, as PyTorch).

x (B, I, spatial...), weight (O, I/groups, kernel...), bias (O,) -> (B, O, spatial...). Saves x; a deferred weight
gradient (W) holds x and the gradient of the output. FLOPs: 2 x outputs x I/groups x kernel, as FlopCounterMode counts.

conv_transpose(x, weight, bias?): the transposed convolution, as in the input gradient of a convolution; weight (I,
O/groups, kernel...). FLOPs: 2 x inputs x O/groups x kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    x, weight = inputs[0], inputs[1]
    assert x is not None and weight is not None
    spatial = [
        (int(size) + 2 * padding - dilation * (int(kernel) - 1) - 1) // stride + 1
        for size, kernel, stride, padding, dilation in zip(
            x[2:],
            weight[2:],
            attributes["stride"],
            attributes["padding"],
            attributes["dilation"],
            strict=True,
        )
    ]
    return ((x[0], weight[0], *spatial),)


def _transposed_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    x, weight = inputs[0], inputs[1]
    assert x is not None and weight is not None
    spatial = [
        (int(size) - 1) * stride - 2 * padding + dilation * (int(kernel) - 1) + behind + 1
        for size, kernel, stride, padding, dilation, behind in zip(
            x[2:],
            weight[2:],
            attributes["stride"],
            attributes["padding"],
            attributes["dilation"],
            attributes["output_padding"],
            strict=True,
        )
    ]
    return ((x[0], int(weight[1]) * int(attributes["groups"]), *spatial),)


def _count_flops(call: OperatorCall) -> Flops:
    return _product_flops(call.outputs[0], call.inputs[1])


def _transposed_flops(call: OperatorCall) -> Flops:
    return _product_flops(call.inputs[0], call.inputs[1])


def _product_flops(places: Sequence[int] | None, weight: Sequence[int] | None) -> Flops:
    """FLOPs of one product per output place with all weight dimensions but the first."""
    assert places is not None and weight is not None
    product = 2 * math.prod(places) * math.prod(weight[1:])
    return Flops(product, product, product)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return operator.inputs[:1] if needs_gradient(operator.inputs[1]) else ()


_ATTRIBUTES = {
    "stride": "one number a spatial dimension",
    "padding": "zeros on both sides, one number a spatial dimension",
    "dilation": "one number a spatial dimension",
    "groups": "number of separate groups of channels",
}

_ALIKE: Mapping[str, Any] = {
    "inputs": ("x", "weight", "bias?"), "saves": _saved_values, "gathers": {1: 2, 2: 1}, "pending_values": (0,),
    "pending_gradients": True, "boundary": True, "heavy": True, "is_convolution": True,
}  # fmt: skip
"""Fields that both kinds share."""

OPERATORS = (
    OperatorKind(
        kind="conv",
        summary="Convolution over all dimensions behind rows and channels; weight is (out, in / groups, kernel...).",
        attributes=_ATTRIBUTES,
        shapes=_output_shapes,
        flops=_count_flops,
        **_ALIKE,
    ),
    OperatorKind(
        kind="conv_transpose",
        summary="Transposed convolution; weight is (in, out / groups, kernel...).",
        attributes={**_ATTRIBUTES, "output_padding": "additional size of the output, one number a spatial dimension"},
        shapes=_transposed_shapes,
        flops=_transposed_flops,
        **_ALIKE,
    ),
)
