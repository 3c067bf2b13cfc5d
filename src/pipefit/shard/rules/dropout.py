"""dropout: pointwise. Its key counts tokens and features of the full tensor, so a device needs its position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import DevicePart, OperatorLabels
from pipefit.shard.rules.pointwise import label_pointwise


def label_dropout(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    return replace(label_pointwise(operator, inputs, outputs), local=place_of_cut)


def place_of_cut(attributes: Mapping[str, Any], shape: Shape, cut: DevicePart) -> Mapping[str, Any]:
    """Return the attribute `cut`: [dimension, first index (-1: from the runtime's tokens), full size]."""
    return {**attributes, "cut": [cut.dim, cut.start, cut.total]}


RULES = {"dropout": label_dropout}
