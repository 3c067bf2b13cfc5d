"""aten(values...): a PyTorch function without an operator kind, called unchanged. The I action does its whole backward.

`target` names the function (`aten.topk.default`). `arguments` and `keywords` are the arguments of the call, with
{"input": i} for values, {"size": "4*B"} for sizes and {"type": "compute"} for dtypes. The function is opaque: it counts
no FLOPs and is assumed to save its inputs and its output. `model/analysis/aten_splits.py` lists the functions that can
be split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import OperatorKind


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    return (tuple(attributes["shape"]),)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return (*operator.inputs, *operator.outputs) if any(map(needs_gradient, operator.inputs)) else ()


OPERATORS = (
    OperatorKind(
        kind="aten",
        summary="A function of PyTorch, called as it is.",
        inputs=("values*",),
        attributes={
            "target": "library, function and overload: `aten.topk.default`",
            "arguments": "of the call, in order",
            "keywords": "of the call, by name",
            "result": "which of several results; null where there is one",
            "shape": "of the result",
            "dtype": "of the result",
        },
        shapes=_output_shapes,
        saves=_saved_values,
        boundary=True,
        output_dtype="attribute",
    ),
)
