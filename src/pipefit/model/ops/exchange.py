"""all_to_all over the shard axis: what was split along one dimension is split along another afterwards.

Its backward is an all_to_all the other way. Like other collectives it keeps nothing and is not run again under
selective recomputation; `cost/comm/lowerings.py` prices it, `run/sharded/parts.py` does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape, Size
from pipefit.model.ops.kind import OperatorKind


def lowering_of(operator: Operator) -> tuple[str, str]:
    """How a collective moves uneven parts, forward and backward: its attribute `lowering`, `grouped` for both or
    `padded+alltoallv`; padded where it has none."""
    forward, _, backward = operator.attributes.get("lowering", "padded").partition("+")
    return forward, backward or forward


def _exchanged_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    x = inputs[0]
    assert x is not None
    new: dict[int, Size] = {attributes["from"]: attributes["whole"], attributes["dim"]: attributes["size"]}
    return (tuple(new.get(dim, size) for dim, size in enumerate(x)),)


OPERATORS = (
    OperatorKind(
        kind="all_to_all",
        summary="G(from) to G(dim).",
        inputs=("x",),
        attributes={
            "dim": "the dimension that is split afterwards",
            "size": "its size on this device afterwards",
            "from": "the dimension that becomes whole",
            "whole": "its size afterwards",
        },
        shapes=_exchanged_shapes,
        boundary=True,
    ),
)
