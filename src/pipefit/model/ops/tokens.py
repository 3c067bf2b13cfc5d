"""put_tokens and take_tokens: move hidden states between a token sequence and a packed row of images, by position.

`put_tokens(h_BTD, x_1ID, places_1I)`: h with the I rows of x at the positions b T + t in `places`, each at most once.
With `drops`, a position may be -1: that row of x is left out (a start token that only the image encoder has).
`take_tokens(h_BTD, places_1L)`: the rows of h at those positions, (1, L, D). They put image embeddings into the token
sequence, and take out the hidden states that condition an image generator. Positions belong to the step plan; the
received x is kept until its backward. I and L may be zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import OperatorCall, OperatorKind, same_shape

_CUT = {"cut": "of a sequence that is split: [0 or 1, the first row's or token's place (-1: by shares), all of them]"}


def _saved_for_put(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    """x: a received tensor is kept until its backward has its gradient."""
    return operator.inputs[1:2] if needs_gradient(operator.inputs[1]) else ()


def _spare_bytes(call: OperatorCall) -> int:
    """With a split sequence or dropped rows: a copy with one extra row."""
    h = call.inputs[0]
    assert h is not None
    spare = "cut" in call.attributes or call.attributes.get("drops", False)
    return math.prod(h) * call.compute_bytes if spare else 0


def _taken_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    h, places = inputs
    assert h is not None and places is not None
    return ((*places, h[-1]),)


OPERATORS = (
    OperatorKind(
        kind="put_tokens",
        summary="h (B,T,D) with rows of x (1,I,D) in the places (1,I), counted b T + t, each named once.",
        inputs=("h", "x", "places"),
        attributes=_CUT | {"drops": "absent, or true: rows at the place -1 are left out"},
        shapes=same_shape,
        saves=_saved_for_put,
        forward_extra=_spare_bytes,
        backward_extra=_spare_bytes,
        boundary=True,
        moves_tokens=True,
    ),
    OperatorKind(
        kind="take_tokens",
        summary="The rows of h (B,T,D) at the places (1,L), counted b T + t: (1,L,D).",
        inputs=("h", "places"),
        attributes=_CUT,
        shapes=_taken_shapes,
        forward_extra=_spare_bytes,
        backward_extra=_spare_bytes,
        boundary=True,
        moves_tokens=True,
    ),
)
