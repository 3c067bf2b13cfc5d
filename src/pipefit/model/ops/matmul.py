"""matmul(a, b): a matrix product of two activations, batched over the leading dimensions. Keeps both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape, broadcast
from pipefit.model.ops.kind import Call, Flops, OperatorKind


def _shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    a, b = inputs[0], inputs[1]
    assert a is not None and b is not None and len(a) >= 2 and len(b) >= 2
    return ((*broadcast(a[:-2], b[:-2]), a[-2], b[-1]),)


def _flops(call: Call) -> Flops:
    a = call.inputs[0]
    assert a is not None
    product = 2 * math.prod(call.outputs[0]) * a[-1]
    return Flops(product, 2 * product, 0)


def _saves(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    a, b = operator.inputs
    return tuple(kept for kept, other in ((a, b), (b, a)) if needs_gradient(other))


OPERATORS = (
    OperatorKind(
        kind="matmul",
        summary="Product of the last two dimensions of two activations; leading dimensions broadcast.",
        inputs=("a", "b"),
        shapes=_shapes,
        flops=_flops,
        saves=_saves,
        boundary=True,
        heavy=True,
    ),
)
