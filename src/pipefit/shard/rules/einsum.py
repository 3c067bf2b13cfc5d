"""einsum: split by every letter; a letter missing in the result gives a partial sum. Linear in each operand."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.einsum import einsum_labels
from pipefit.shard.rules import OperatorLabels


def label_einsum(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    operands, result = einsum_labels(operator.attributes)
    letters = [
        None if shape is None else tuple(operand) for operand, shape in zip([*operands, ""], inputs, strict=False)
    ]
    return OperatorLabels(
        inputs=tuple(letters),
        outputs=(tuple(result),),
        units={},
        linear=tuple((index,) for index, shape in enumerate(inputs) if shape is not None),
    )


RULES = {"einsum": label_einsum}
