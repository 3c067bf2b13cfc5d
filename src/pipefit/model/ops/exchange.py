"""all_to_all over the shard axis: changes the split dimension of a tensor.

Its backward is the reverse all_to_all. Like other collectives it saves nothing and is not rerun under selective
recomputation. `cost/comm/lowerings.py` prices it and `run/sharded/parts.py` executes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape, Size
from pipefit.model.ops.kind import OperatorKind


def lowering_of(operator: Operator) -> tuple[str, str]:
    """Return the lowering of a collective with uneven parts, forward and backward. The attribute `lowering` is one word
    for both (`grouped`) or two (`padded+alltoallv`); the default is `padded`."""
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
