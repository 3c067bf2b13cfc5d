"""aten(values...): a function of PyTorch that has no kind of its own, called as it is. Fused backward, all of it in I.

`target` names it (`aten.topk.default`); `arguments` and `keywords` are those of the call, with {"input": i} for the
values, {"size": "4*B"} for sizes and {"type": "compute"} for number types. Nothing is known of its inside: it counts no
FLOPs, and keeps its inputs and its output (an estimate). How the known ones may be split:
`model/analysis/aten_splits.py`.
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
