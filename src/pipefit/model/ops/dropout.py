"""dropout(x): zeros with probability p, the rest divided by 1 - p, keyed by (seed, step, row, layer, index).

Keeps nothing: the backward pass draws the same mask again from its key.
"""

from __future__ import annotations

from pipefit.model.ops.kind import OperatorKind, same_shape

OPERATORS = (
    OperatorKind(
        kind="dropout",
        summary="Dropout in training; the identity in evaluation.",
        inputs=("x",),
        attributes={"p": "probability of a zero", "index": "number of this dropout within its layer: part of the key"},
        shapes=same_shape,
    ),
)
