"""rms_norm(x, weight?): x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

Keeps x and one reciprocal root mean square per row; statistics are computed in float32 or wider.
"""

from __future__ import annotations

import math

from pipefit.model.ops.kind import Call, OperatorKind, same_shape, save_input


def _own_bytes(call: Call) -> int:
    x = call.inputs[0]
    assert x is not None
    return math.prod(x[:-1]) * call.wide_bytes


OPERATORS = (
    OperatorKind(
        kind="rms_norm",
        summary="Root-mean-square norm over the last dimension.",
        inputs=("x", "weight?"),
        attributes={"eps": "added to the mean square"},
        shapes=same_shape,
        saves=save_input,
        own_bytes=_own_bytes,
    ),
)
