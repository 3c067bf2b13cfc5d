"""sum(x) over some dimensions. Saves nothing: its gradient is the gradient of the result, repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Shape
from pipefit.model.ops.kind import OperatorKind


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    x, dims, keepdim = inputs[0], attributes["dims"], attributes["keepdim"]
    assert x is not None
    return (tuple(1 if dim in dims else size for dim, size in enumerate(x) if keepdim or dim not in dims),)


OPERATORS = (
    OperatorKind(
        kind="sum",
        summary="The sum over dimensions.",
        inputs=("x",),
        attributes={"dims": "dimensions, not negative", "keepdim": "whether they stay, with size 1"},
        shapes=_output_shapes,
    ),
)
