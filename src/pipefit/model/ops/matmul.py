"""matmul(a, b): a matrix product of two activations, batched over the leading dimensions. Saves both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipefit.model.graph import Operator, Shape, broadcast_shapes, has_tokens
from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    a, b = inputs[0], inputs[1]
    assert a is not None and b is not None and len(a) >= 2 and len(b) >= 2
    return ((*broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1]),)


def _count_flops(call: OperatorCall) -> Flops:
    a = call.inputs[0]
    assert a is not None
    product = 2 * math.prod(call.outputs[0]) * a[-1]
    return Flops(product, 2 * product, 0)


def _mixed_tokens(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> str:
    if has_tokens(inputs[0][-1]):
        return "that sums over tokens"
    return "of every token with every other" if has_tokens(inputs[1][-1]) else ""


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    a, b = operator.inputs
    return tuple(operand for operand, partner in ((a, b), (b, a)) if needs_gradient(partner))


OPERATORS = (
    OperatorKind(
        kind="matmul",
        summary="Product of the last two dimensions of two activations; leading dimensions broadcast.",
        inputs=("a", "b"),
        shapes=_output_shapes,
        flops=_count_flops,
        saves=_saved_values,
        boundary=True,
        heavy=True,
        is_product=True,
        makes_features=True,
        mixes_tokens=_mixed_tokens,
    ),
)
