"""rms_norm(x, weight?): x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

Keeps x and one reciprocal root mean square per row; statistics are computed in float32 or wider.
While it runs, it has up to two tensors like x in the wide type, and four in its backward (`run/ops/norm.py`).
"""

from __future__ import annotations

import math

from pipefit.model.ops.kind import Call, OperatorKind, same_shape, save_input


def _own_bytes(call: Call) -> int:
    x = call.inputs[0]
    assert x is not None
    return math.prod(x[:-1]) * call.wide_bytes


def _forward_extra(call: Call) -> int:
    x = call.inputs[0]
    assert x is not None
    wide = call.wide_bytes
    if wide == call.compute_bytes:  # the normed x, before the weight
        return math.prod(x) * wide
    return 2 * math.prod(x) * wide


def _backward_extra(call: Call) -> int:
    x = call.inputs[0]
    assert x is not None
    return math.prod(x) * (4 * call.wide_bytes - call.compute_bytes)


OPERATORS = (
    OperatorKind(
        kind="rms_norm",
        summary="Root-mean-square norm over the last dimension.",
        inputs=("x", "weight?"),
        attributes={"eps": "added to the mean square"},
        shapes=same_shape,
        saves=save_input,
        own_bytes=_own_bytes,
        forward_extra=_forward_extra,
        backward_extra=_backward_extra,
    ),
)
