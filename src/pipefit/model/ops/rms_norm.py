"""rms_norm(x, weight?): x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019). With
the attribute `offset` the factor is offset + weight (Gemma).

Saves x and one reciprocal root mean square per row; statistics are computed in float32 or wider. The forward needs up
to two temporary tensors like x in the wide dtype, the backward four (`run/ops/norm.py`). `rms_norm_shard` works on a
range of the features: the forward and the backward each reduce one sum per token over the devices.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pipefit.model.ops.kind import InternalCollectives, OperatorCall, OperatorKind, all_reduces, same_shape, save_input


def _own_bytes(call: OperatorCall) -> int:
    x = call.inputs[0]
    assert x is not None
    return math.prod(x[:-1]) * call.wide_bytes


def _forward_extra(call: OperatorCall) -> int:
    x = call.inputs[0]
    assert x is not None
    wide = call.wide_bytes
    if wide == call.compute_bytes:  # the normed x, before the weight
        return math.prod(x) * wide
    return 2 * math.prod(x) * wide


def _backward_extra(call: OperatorCall) -> int:
    x = call.inputs[0]
    assert x is not None
    return math.prod(x) * (4 * call.wide_bytes - call.compute_bytes)


def _inner_collectives(call: OperatorCall) -> InternalCollectives:
    """All-reduces of the sum of squares of every token, and in the backward of gradient times normalized x."""
    size = float(_own_bytes(call))
    return InternalCollectives(forward=all_reduces(size, 1), input_gradient=all_reduces(size, 1))


_ATTRIBUTES = {"eps": "added to the mean square", "offset": "added to the weight; 0 where it is absent"}

_RMS_NORM = OperatorKind(
    kind="rms_norm",
    summary="Root-mean-square norm over the last dimension.",
    inputs=("x", "weight?"),
    attributes=_ATTRIBUTES,
    shapes=same_shape,
    saves=save_input,
    own_bytes=_own_bytes,
    forward_extra=_forward_extra,
    backward_extra=_backward_extra,
    is_norm=True,
    mixes_features=True,
    initial_values=("normal", "ones"),
)

OPERATORS = (
    _RMS_NORM,
    replace(
        _RMS_NORM,
        kind="rms_norm_shard",
        summary="The same where every device has a run of the features: sums are reduced.",
        attributes=_ATTRIBUTES | {"whole": "the number of all features"},
        talks=_inner_collectives,
        boundary=True,
    ),
)
