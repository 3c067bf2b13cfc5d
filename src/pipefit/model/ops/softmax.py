"""softmax(x) over one dimension. Saves its output.

`softmax_shard` works on a range of that dimension. The forward reduces the maximum and the sum of exponentials over the
devices, the backward one sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipefit.model.graph import Shape, has_tokens
from pipefit.model.ops.kind import InternalCollectives, OperatorCall, OperatorKind, all_reduces, same_shape, save_output


def _inner_collectives(call: OperatorCall) -> InternalCollectives:
    """One number per position of the other dimensions, in the dtype of x: two all-reduces forward, one backward."""
    x, dim = call.inputs[0], int(call.attributes["dim"])
    assert x is not None
    size = float(math.prod(x) // max(1, x[dim]) * call.compute_bytes)
    return InternalCollectives(forward=all_reduces(size, 2), input_gradient=all_reduces(size, 1))


def _product_bytes(call: OperatorCall) -> int:
    """The output times its gradient, in the backward."""
    return math.prod(call.outputs[0]) * call.compute_bytes


def _mixed_tokens(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> str:
    return "along the tokens" if has_tokens(inputs[0][int(attributes["dim"])]) else ""


_SOFTMAX = OperatorKind(
    kind="softmax",
    summary="Softmax over one dimension.",
    inputs=("x",),
    attributes={"dim": "the dimension, not negative"},
    shapes=same_shape,
    saves=save_output,
    mixes_tokens=_mixed_tokens,
)

OPERATORS = (
    _SOFTMAX,
    replace(
        _SOFTMAX,
        kind="softmax_shard",
        summary="The same where every device has a run of the dimension: maximum and sum are reduced.",
        talks=_inner_collectives,
        backward_extra=_product_bytes,
        boundary=True,
    ),
)
