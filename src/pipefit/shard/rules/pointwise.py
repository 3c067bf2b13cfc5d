"""Pointwise operators with broadcasting: split by any dimension; an operand broadcast along it stays replicated.

Partial sums pass through sums, and through products with replicated operands.
"""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labels, OperatorLabels


def label_pointwise(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    rank = len(outputs[0])

    def broadcast_labels(shape: Shape | None) -> Labels | None:
        if shape is None:
            return None
        offset = rank - len(shape)
        return tuple(
            f"d{i + offset}" if size == outputs[0][i + offset] and size != 1 else None for i, size in enumerate(shape)
        )

    out = tuple(None if size == 1 else f"d{i}" for i, size in enumerate(outputs[0]))
    linear = LINEAR.get(operator.kind, ())
    if len(inputs) < 2 or inputs[1] is None:  # the other operand is a number: added to every addend, it counts often
        linear = () if operator.kind in ("add", "sub") else tuple(set_ for set_ in linear if set_ == (0,))
    return OperatorLabels(inputs=tuple(map(broadcast_labels, inputs)), outputs=(out,), units={}, linear=linear)


LINEAR = {"add": ((0, 1),), "sub": ((0, 1),), "mul": ((0,), (1,)), "div": ((0,),), "neg": ((0,),)}
"""Sets of inputs in which the output is jointly linear."""

RULES = dict.fromkeys(
    (
        "add",
        "sub",
        "mul",
        "div",
        "silu",
        "gelu",
        "relu",
        "sigmoid",
        "tanh",
        "exp",
        "rsqrt",
        "neg",
        "cast",
    ),
    label_pointwise,
)
