"""softmax(x) over one dimension. Keeps its output."""

from __future__ import annotations

from pipefit.model.ops.kind import OperatorKind, same_shape, save_output

OPERATORS = (
    OperatorKind(
        kind="softmax",
        summary="Softmax over one dimension.",
        inputs=("x",),
        attributes={"dim": "the dimension, not negative"},
        shapes=same_shape,
        saves=save_output,
    ),
)
