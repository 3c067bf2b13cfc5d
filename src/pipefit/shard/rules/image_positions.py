"""image_positions: split by rows or tokens, and by features."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import OperatorLabels


def image_positions(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    assert inputs[0] is not None
    patches = (None,) * (len(inputs[0]) - 3)
    x = ("d0", "d1", *patches, "features")
    start = None if inputs[3] is None else ("features",)
    return OperatorLabels(inputs=(x, ("d0", "d1", None), (None, "features"), start), outputs=(x,), units={})


RULES = {"image_positions": image_positions}
