"""layer_norm(x, weight?, bias?): standardize the last dimension, then scale and shift (Ba et al., 2016).

Saves x and, per row, the mean and the reciprocal standard deviation, in float32 or wider. `layer_norm_shard` works on a
range of the features. The forward reduces two sums per token over the devices: the features, then their squared
distances from the mean. The backward reduces two sums at once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pipefit.model.ops.kind import InternalCollectives, OperatorCall, OperatorKind, all_reduces, same_shape, save_input


def _own_bytes(call: OperatorCall) -> int:
    x = call.inputs[0]
    assert x is not None
    return 2 * math.prod(x[:-1]) * call.wide_bytes


def _inner_collectives(call: OperatorCall) -> InternalCollectives:
    """All-reduces of the sum and of the squared distances from the mean per token; in the backward one of two sums."""
    size = float(_own_bytes(call))
    return InternalCollectives(forward=all_reduces(size / 2, 2), input_gradient=all_reduces(size, 1))


def _shard_forward_extra(call: OperatorCall) -> int:
    """Temporaries of plain PyTorch: the distances from the mean, their squares, and the normalized x in the wide
    dtype."""
    x = call.inputs[0]
    assert x is not None
    return 2 * math.prod(x) * call.wide_bytes


def _shard_backward_extra(call: OperatorCall) -> int:
    x = call.inputs[0]
    assert x is not None
    return math.prod(x) * (4 * call.wide_bytes - call.compute_bytes)


_LAYER_NORM = OperatorKind(
    kind="layer_norm",
    summary="Layer norm over the last dimension.",
    inputs=("x", "weight?", "bias?"),
    attributes={"eps": "added to the variance"},
    shapes=same_shape,
    saves=save_input,
    own_bytes=_own_bytes,
    is_norm=True,
    mixes_features=True,
    initial_values=("normal", "ones", "zeros"),
)

OPERATORS = (
    _LAYER_NORM,
    replace(
        _LAYER_NORM,
        kind="layer_norm_shard",
        summary="The same where every device has a run of the features: sums are reduced.",
        attributes={"eps": "added to the variance", "whole": "the number of all features"},
        talks=_inner_collectives,
        forward_extra=_shard_forward_extra,
        backward_extra=_shard_backward_extra,
        boundary=True,
    ),
)
