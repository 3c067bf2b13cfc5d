"""constant() -> known numbers: tables of rotary embeddings, positions, masks. Computed once and kept with the
program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Shape
from pipefit.model.ops.kind import OperatorKind


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    return (tuple(attributes["shape"]),)


OPERATORS = (
    OperatorKind(
        kind="constant",
        summary="Known numbers.",
        inputs=(),
        attributes={
            "values": "all numbers in order (0 and 1 for bool), or `causal`: key j is seen by query i where j <= i",
            "shape": "list of integers",
            "dtype": "`compute`, `float32`, `int64`, `int32` or `bool`",
        },
        shapes=_output_shapes,
        output_dtype="attribute",
    ),
)
