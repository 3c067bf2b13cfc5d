"""layer_norm(x, weight?, bias?): standardize the last dimension, then scale and shift (Ba et al., 2016).

Keeps x and, per row, the mean and the reciprocal standard deviation, in float32 or wider.
"""

from __future__ import annotations

import math

from pipefit.model.ops.kind import Call, OperatorKind, same_shape, save_input


def _own_bytes(call: Call) -> int:
    x = call.inputs[0]
    assert x is not None
    return 2 * math.prod(x[:-1]) * call.wide_bytes


OPERATORS = (
    OperatorKind(
        kind="layer_norm",
        summary="Layer norm over the last dimension.",
        inputs=("x", "weight?", "bias?"),
        attributes={"eps": "added to the variance"},
        shapes=same_shape,
        saves=save_input,
        own_bytes=_own_bytes,
    ),
)
