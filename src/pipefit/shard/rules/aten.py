"""aten: by the dimensions that are known not to see each other (`model/aten_splits`); else whole everywhere."""

from __future__ import annotations

from pipefit.model.aten_splits import splits
from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labelled, whole


def aten(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    known = splits(operator.attributes, [shape for shape in inputs if shape is not None])
    if known is None:
        return Labelled(inputs=tuple(map(whole, inputs)), outputs=((None,) * len(outputs[0]),), units={})
    return Labelled(inputs=known[0], outputs=(known[1],), units={})


RULES = {"aten": aten}
