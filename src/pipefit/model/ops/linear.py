"""linear(x, weight, bias?) -> x weight^T + bias. Saves x; a deferred weight gradient (W) holds x and the gradient of
the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    x, weight = inputs[0], inputs[1]
    assert x is not None and weight is not None
    return ((*x[:-1], weight[0]),)


def _count_flops(call: OperatorCall) -> Flops:
    x, weight = call.inputs[0], call.inputs[1]
    assert x is not None and weight is not None
    product = 2 * math.prod(x) * weight[0]
    return Flops(product, product, product)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return operator.inputs[:1] if needs_gradient(operator.inputs[1]) else ()


def _widened_bytes(call: OperatorCall) -> int:
    """x and the gradient of the output in the dtype of the weight's gradient buffer."""
    x = call.inputs[0]
    assert x is not None
    return (math.prod(x) + math.prod(call.outputs[0])) * call.wide_bytes


OPERATORS = (
    OperatorKind(
        kind="linear",
        summary="x weight^T + bias over the last dimension of x; weight is (out, in).",
        inputs=("x", "weight", "bias?"),
        shapes=_output_shapes,
        flops=_count_flops,
        saves=_saved_values,
        gathers={1: 2, 2: 1},
        pending_values=(0,),
        pending_gradients=True,
        widened_bytes=_widened_bytes,
        boundary=True,
        heavy=True,
        is_product=True,
        is_linear=True,
        makes_features=True,
        mixes_features=True,
        column_label="out",
        factors_kind="linear_factors",
        initial_values=("normal", "normal", "zeros"),
    ),
)
