"""embedding: split by rows or tokens, by features (table G1), or by vocabulary (table G0).

With a split vocabulary every device looks up the tokens of its own part and returns zeros for all other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import DevicePart, OperatorLabels


def label_embedding(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    front = tuple(f"d{i}" for i in range(len(outputs[0]) - 1))
    return OperatorLabels(
        inputs=(front, ("vocabulary", "features")), outputs=((*front, "features"),), units={}, addend=own_rows
    )


def own_rows(attributes: Mapping[str, Any], cut: DevicePart) -> Mapping[str, Any]:
    """Return the attribute `first`: the index of the table's first row on this device."""
    return {**attributes, "first": cut.start}


RULES = {"embedding": label_embedding}
