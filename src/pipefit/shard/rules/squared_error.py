"""squared_error: split by every dimension; the sum is partial."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import OperatorLabels


def squared_error(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    prediction = inputs[0]
    assert prediction is not None
    labels = tuple(f"d{i}" for i in range(len(prediction)))
    return OperatorLabels(inputs=(labels, labels), outputs=((),), units={})


RULES = {"squared_error": squared_error}
