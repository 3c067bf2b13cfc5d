"""cross_entropy(logits_BTV, labels_BT) -> the sum over valid labels of log sum exp(logits) - logits[label].

Computed in float32 or wider. Saves the logits and one log-sum-exp per token; the backward recomputes the softmax in
chunks of rows. `cross_entropy_shard` works on a range of the vocabulary (Megatron-LM's vocabulary-parallel loss:
Shoeybi et al., 2019): two numbers per token are reduced over the devices and no logits are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import InternalCollectives, OperatorCall, OperatorKind, all_reduces


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    return ((),)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return operator.inputs[:1]


def _own_bytes(call: OperatorCall) -> int:
    logits = call.inputs[0]
    assert logits is not None
    return math.prod(logits[:-1]) * call.wide_bytes


CHUNK_NUMBERS = 1 << 26
"""Number of logits that are converted to the wide dtype at once."""


def _chunk_bytes(call: OperatorCall) -> int:
    logits = call.inputs[0]
    assert logits is not None
    return min(math.prod(logits), max(CHUNK_NUMBERS, logits[-1])) * call.wide_bytes


def _forward_extra(call: OperatorCall) -> int:
    """For one chunk of rows: the logits minus their maximum, and the logits in the wide dtype if it differs."""
    return _chunk_bytes(call) * (1 if call.wide_bytes == call.compute_bytes else 2)


def _backward_extra(call: OperatorCall) -> int:
    """For one chunk of rows: the softmax in the wide dtype, if it differs from the gradient's dtype."""
    return 0 if call.wide_bytes == call.compute_bytes else _chunk_bytes(call)


def _inner_collectives(call: OperatorCall) -> InternalCollectives:
    """All-reduces of the largest logit of every token and of the sum of exponentials."""
    return InternalCollectives(forward=all_reduces(_own_bytes(call), 2))


OPERATORS = (
    OperatorKind(
        kind="cross_entropy",
        summary="Sum (not mean) of the cross-entropy over labels other than ignore_index.",
        inputs=("logits", "labels"),
        attributes={"ignore_index": "label that does not count; -100"},
        shapes=_output_shapes,
        saves=_saved_values,
        own_bytes=_own_bytes,
        forward_extra=_forward_extra,
        backward_extra=_backward_extra,
        boundary=True,
        output_dtype="float32",
        scores_classes=True,
    ),
    OperatorKind(
        kind="cross_entropy_shard",
        summary="Addend of the sum where every device has the logits of a run of the vocabulary.",
        inputs=("logits", "labels"),
        attributes={"ignore_index": "label that does not count; -100", "first": "the first label of this device"},
        shapes=_output_shapes,
        saves=_saved_values,
        own_bytes=_own_bytes,
        talks=_inner_collectives,
        forward_extra=_forward_extra,
        backward_extra=_backward_extra,
        boundary=True,
        output_dtype="float32",
    ),
)
