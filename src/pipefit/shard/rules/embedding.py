"""embedding: by rows or tokens, or by features (table G1). By vocabulary comes with the search."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labelled


def embedding(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    front = tuple(f"d{i}" for i in range(len(outputs[0]) - 1))
    return Labelled(inputs=(front, (None, "features")), outputs=((*front, "features"),), units={})


RULES = {"embedding": embedding}
