"""embedding(tokens, weight): rows of a table. Saves nothing, because the step plan owns the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Shape
from pipefit.model.ops.kind import OperatorCall, OperatorKind


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    tokens, weight = inputs[0], inputs[1]
    assert tokens is not None and weight is not None
    return ((*tokens, weight[1]),)


def _widened_bytes(call: OperatorCall) -> int:
    """The gradient of the rows in the dtype of the table's gradient buffer."""
    return math.prod(call.outputs[0]) * call.wide_bytes


OPERATORS = (
    OperatorKind(
        kind="embedding",
        summary="weight[tokens]; weight is (vocabulary, features). Also position tables: embedding(positions, weight).",
        inputs=("tokens", "weight"),
        attributes={"padding": "a row that gets no gradient; absent where there is none"},
        shapes=_output_shapes,
        gathers={1: 1},
        pending_gradients=True,
        widened_bytes=_widened_bytes,
        boundary=True,
        is_lookup=True,
        makes_features=True,
        output_dtype="compute",
    ),
)
