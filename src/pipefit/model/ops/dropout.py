"""dropout(x): zeros with probability p, the rest divided by 1 - p, keyed by (seed, step, row, layer, index).

Saves no mask: the backward draws it again from a key of four bytes per token. The key is also kept under selective
recomputation.
"""

from __future__ import annotations

import math

from pipefit.model.ops.kind import OperatorCall, OperatorKind, same_shape


def _own_bytes(call: OperatorCall) -> int:
    x = call.inputs[0]
    assert x is not None
    return 4 * math.prod(x[:2])


OPERATORS = (
    OperatorKind(
        kind="dropout",
        summary="Dropout in training; the identity in evaluation.",
        inputs=("x",),
        attributes={
            "p": "probability of a zero",
            "index": "number of this dropout within its layer: part of the key",
            "by": "`rows`: the key counts rows and places within them; absent: rows, tokens and features",
        },
        shapes=same_shape,
        own_bytes=_own_bytes,
        own_bytes_stay=True,
    ),
)
