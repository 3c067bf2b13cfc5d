"""rotary: by rows, tokens and heads; the positions go with rows and tokens."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labelled


def rotary(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    return Labelled(inputs=(("d0", "d1", "d2", None), ("d0", "d1")), outputs=(("d0", "d1", "d2", None),), units={})


RULES = {"rotary": rotary}
