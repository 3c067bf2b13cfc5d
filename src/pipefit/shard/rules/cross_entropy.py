"""cross_entropy: by rows or tokens; the sum is then partial."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labelled, leading


def cross_entropy(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    logits = inputs[0]
    assert logits is not None
    labels = leading(len(logits))
    return Labelled(inputs=(labels, labels[:-1]), outputs=((),), units={})


RULES = {"cross_entropy": cross_entropy}
