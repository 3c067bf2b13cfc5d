"""moe: by rows or tokens, with all experts everywhere: no token is dropped, so tokens do not see each other."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labelled, leading, whole


def moe(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    labels = leading(len(outputs[0]))
    return Labelled(inputs=(labels, *map(whole, inputs[1:])), outputs=(labels,), units={})


RULES = {"moe": moe}
