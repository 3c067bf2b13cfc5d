"""attention: split by rows, by heads, or by queries with full keys.

A unit of heads is one group of keys with all query heads that read it. Queries split along tokens need their positions,
to attend to the right keys. Queries that see keys behind them are not split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import DevicePart, OperatorLabels
from pipefit.shard.rules.dropout import place_of_cut


def label_attention(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    k = inputs[1]
    assert k is not None
    keys, queries = ("d0", None, "heads", None), ("d0", "d1", "heads", None)
    units = {"heads": int(k[2])}
    if operator.attributes.get("ahead"):  # keys behind a device's part of the queries would not be seen
        unsplit = ("d0", None, "heads", None)
        return OperatorLabels(inputs=(unsplit, keys, keys, ("d0", None)), outputs=(unsplit,), units=units)
    sinks = (("heads",),) * (len(inputs) - 3)
    return OperatorLabels(inputs=(queries, keys, keys, *sinks), outputs=(queries,), units=units, local=place_of_queries)


def place_of_queries(attributes: Mapping[str, Any], shape: Shape, cut: DevicePart) -> Mapping[str, Any]:
    """Return the attribute `cut`, as in dropout, if queries are split."""
    return place_of_cut(attributes, shape, cut) if cut.dim == 1 else attributes


RULES = {"attention": label_attention}
