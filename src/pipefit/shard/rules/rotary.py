"""rotary: split by rows, tokens and heads; the positions are split with rows and tokens. Linear in x.

Angles are computed once for all layers from the positions of the full slice, so a device needs its position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import DevicePart, OperatorLabels
from pipefit.shard.rules.dropout import place_of_cut


def label_rotary(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    x, positions = inputs
    assert x is not None and positions is not None
    labels = ("d0", "d1", *(None,) * (len(x) - 4), "d2", None)
    places = ("d0", "d1", *(None,) * (len(positions) - 2))
    return OperatorLabels(inputs=(labels, places), outputs=(labels,), units={}, linear=((0,),), local=place_of_angles)


def place_of_angles(attributes: Mapping[str, Any], shape: Shape, cut: DevicePart) -> Mapping[str, Any]:
    """Return the attribute `cut`, as in dropout, if rows or tokens are split; angles are the same for all heads."""
    return place_of_cut(attributes, shape, cut) if cut.dim < 2 else attributes


RULES = {"rotary": label_rotary}
