"""put_tokens, take_tokens: by features, and what is taken by its places. Linear: partial sums pass through.

Rows and tokens of the sequence stay whole: a place may lie anywhere in it.
"""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labelled, whole


def put_tokens(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    features = (None, None, "features")
    return Labelled(inputs=(features, features, whole(inputs[2])), outputs=(features,), units={}, linear=((0, 1),))


def take_tokens(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    return Labelled(
        inputs=((None, None, "features"), (None, "places")),
        outputs=((None, "places", "features"),),
        units={},
        linear=((0,),),
    )


RULES = {"put_tokens": put_tokens, "take_tokens": take_tokens}
