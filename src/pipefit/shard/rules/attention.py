"""attention: by rows and by heads. A unit is one group of keys with all query heads that read it."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labelled


def attention(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    k = inputs[1]
    assert k is not None
    labels = ("d0", None, "heads", None)
    return Labelled(inputs=(labels, labels, labels), outputs=(labels,), units={"heads": int(k[2])})


RULES = {"attention": attention}
