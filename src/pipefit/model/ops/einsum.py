"""einsum(a, b?) {equation}: a product of one or two activations, summed over the labels that are not in the result.

Saves both operands. FLOPs with two operands: 2 x the product of all label sizes; the backward computes one product per
operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape, Size
from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind


def einsum_labels(attributes: Mapping[str, Any]) -> tuple[list[str], str]:
    """(letters of each operand, letters of the result)."""
    before, _, after = str(attributes["equation"]).replace(" ", "").partition("->")
    return before.split(","), after


def label_sizes(attributes: Mapping[str, Any], shapes: tuple[Shape | None, ...]) -> dict[str, Size]:
    """The size of every letter."""
    sizes: dict[str, Size] = {}
    for letters, shape in zip(einsum_labels(attributes)[0], shapes, strict=False):
        assert shape is not None and len(letters) == len(shape)
        sizes.update(zip(letters, shape, strict=True))
    return sizes


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    sizes = label_sizes(attributes, inputs)
    return (tuple(sizes[letter] for letter in einsum_labels(attributes)[1]),)


def _count_flops(call: OperatorCall) -> Flops:
    if call.inputs[1] is None:
        return Flops()
    product = 2 * math.prod(int(size) for size in label_sizes(call.attributes, call.inputs).values())
    return Flops(product, 2 * product, 0)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    a, b = operator.inputs
    if not b:
        return ()
    return tuple(operand for operand, partner in ((a, b), (b, a)) if needs_gradient(partner))


OPERATORS = (
    OperatorKind(
        kind="einsum",
        summary="Einstein summation of one or two activations or parameters; every letter once an operand.",
        inputs=("a", "b?"),
        attributes={"equation": "letters of the operands and of the result, such as `bsd,bsec->becd`"},
        shapes=_output_shapes,
        flops=_count_flops,
        saves=_saved_values,
        boundary=True,
        heavy=True,
    ),
)
