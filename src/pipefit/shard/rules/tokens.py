"""put_tokens, take_tokens: split by rows, tokens and features of the sequence; taken tokens also by their places.

A device with a part of the sequence puts and takes only the tokens of that part; taken tokens are an addend, with zeros
elsewhere. Linear: partial sums pass through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import DevicePart, OperatorLabels, whole_labels
from pipefit.shard.rules.dropout import place_of_cut

SEQUENCE = ("d0", "d1", "features")


def put_tokens(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    return OperatorLabels(
        inputs=(SEQUENCE, (None, None, "features"), whole_labels(inputs[2])),
        outputs=(SEQUENCE,),
        units={},
        linear=((0, 1),),
        local=own_part,
    )


def take_tokens(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    return OperatorLabels(
        inputs=(SEQUENCE, (None, "places")),
        outputs=((None, "places", "features"),),
        units={},
        linear=((0,),),
        addend=own_rows,
    )


def own_part(attributes: Mapping[str, Any], shape: Shape, cut: DevicePart) -> Mapping[str, Any]:
    """Return the attribute `cut`, as in dropout, if the sequence is split along rows or tokens."""
    return place_of_cut(attributes, shape, cut) if cut.dim < 2 else attributes


def own_rows(attributes: Mapping[str, Any], cut: DevicePart) -> Mapping[str, Any]:
    """Return the same attribute for the sequence from which tokens are taken."""
    return {**attributes, "cut": [cut.dim, cut.start, cut.total]} if cut.dim < 2 else attributes


RULES = {"put_tokens": put_tokens, "take_tokens": take_tokens}
