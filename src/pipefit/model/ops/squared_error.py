"""squared_error(prediction, target) -> the sum of (prediction - target)^2 over all elements.

The loss of flow matching, with the velocity from noise to data as target (Lipman et al., 2023; Liu et al., 2023). Like
every loss here it is a sum: the run divides by the elements of the step. The difference is computed and saved in
float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Shape
from pipefit.model.ops.kind import OperatorCall, OperatorKind


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    return ((),)


def _own_bytes(call: OperatorCall) -> int:
    """The difference."""
    prediction = call.inputs[0]
    assert prediction is not None
    return math.prod(prediction) * call.wide_bytes


OPERATORS = (
    OperatorKind(
        kind="squared_error",
        summary="Sum (not mean) of squared differences.",
        inputs=("prediction", "target"),
        shapes=_output_shapes,
        own_bytes=_own_bytes,
        forward_extra=_own_bytes,
        backward_extra=_own_bytes,
        boundary=True,
        output_dtype="float32",
    ),
)
