"""expand(x): repeats size-1 dimensions to a larger shape, as torch.expand does: a view. Saves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Shape
from pipefit.model.ops.kind import OperatorKind


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    return (tuple(attributes["shape"]),)


OPERATORS = (
    OperatorKind(
        kind="expand",
        summary="x repeated along new dimensions in front and along dimensions of one, without a copy.",
        inputs=("x",),
        attributes={"shape": "list of sizes"},
        shapes=_output_shapes,
        view=True,
    ),
)
