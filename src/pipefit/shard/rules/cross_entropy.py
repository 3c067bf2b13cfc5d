"""cross_entropy: split by rows or tokens, or by vocabulary with each device's first label; the sum is partial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import DevicePart, OperatorLabels


def cross_entropy(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    logits = inputs[0]
    assert logits is not None
    last = len(logits) - 1
    front = tuple(f"d{i}" for i in range(last))

    def first_label(attributes: Mapping[str, Any], cut: DevicePart) -> Mapping[str, Any]:
        return {**attributes, "first": cut.start} if cut.dim == last else attributes

    return OperatorLabels(
        inputs=((*front, "vocabulary"), front),
        outputs=((),),
        units={},
        kinds={"vocabulary": "cross_entropy_shard"},
        addend=first_label,
    )


RULES = {"cross_entropy": cross_entropy}
