"""layer_norm(x, weight?, bias?): standardize the last dimension, then scale and shift (Ba et al., 2016).

Keeps x and, per row, the mean and the reciprocal standard deviation, in float32 or wider.
`layer_norm_shard` is the same of a run of the features: sums are reduced over the devices, of a token its features and
then their squared distances from the mean, and in the backward two at once.
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
    """The sum of every token, then that of the squared distances from the mean; two sums at once in the backward."""
    size = float(_own_bytes(call))
    return InternalCollectives(forward=all_reduces(size / 2, 2), input_gradient=all_reduces(size, 1))


def _shard_forward_extra(call: OperatorCall) -> int:
    """Of plain PyTorch: the distances from the mean, their squares, and the normed x in the wide type."""
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
