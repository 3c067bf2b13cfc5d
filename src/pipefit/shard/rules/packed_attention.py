"""packed_attention: split by rows, by heads, or by queries with full keys (and full documents of keys)."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import OperatorLabels
from pipefit.shard.rules.attention import place_of_queries


def packed_attention(
    operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]
) -> OperatorLabels:
    k = inputs[1]
    assert k is not None
    heads = ((None,) if len(k) == 5 else ()) + ("heads", None)
    keys, queries = ("d0", None, *heads), ("d0", "d1", *heads)
    grids = (("d0", None, None),) * (len(inputs) - 4)
    return OperatorLabels(
        inputs=(queries, keys, keys, ("d0", None), *grids),
        outputs=(queries,),
        units={"heads": int(k[-2])},
        local=place_of_queries,
    )


RULES = {"packed_attention": packed_attention}
