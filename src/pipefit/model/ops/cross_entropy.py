"""cross_entropy(logits_BTV, labels_BT) -> the sum over valid labels of log sum exp(logits) - logits[label].

Computed in float32 or wider. Keeps the logits and one log-sum-exp per token; the softmax is made again in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import Call, OperatorKind


def _shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    return ((),)


def _saves(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return operator.inputs[:1]


def _own_bytes(call: Call) -> int:
    logits = call.inputs[0]
    assert logits is not None
    return math.prod(logits[:-1]) * call.wide_bytes


OPERATORS = (
    OperatorKind(
        kind="cross_entropy",
        summary="Sum (not mean) of the cross-entropy over labels other than ignore_index.",
        inputs=("logits", "labels"),
        attributes={"ignore_index": "label that does not count; -100"},
        shapes=_shapes,
        saves=_saves,
        own_bytes=_own_bytes,
        boundary=True,
        output_dtype="float32",
    ),
)
