"""reshare over the shard axis: changes the shares by which a dimension is split; the dimension stays the same.

It is inserted between layers with different shares. Every device sends each row or token that moves straight to its new
owner. The backward is the reverse transfer. Like other collectives it saves nothing and is not rerun under selective
recomputation. Rows and tokens of foreign shares are counted as if they were the layer's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import OperatorKind

KIND = "reshare"


def shares_of(operator: Operator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shares of all devices before and afterwards."""
    return tuple(operator.attributes["from"]), tuple(operator.attributes["to"])


def _reshared_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    x, dim = inputs[0], attributes["dim"]
    assert x is not None
    return ((*x[:dim], attributes["size"], *x[dim + 1 :]),)


OPERATORS = (
    OperatorKind(
        kind=KIND,
        summary="G(dim) by some shares to G(dim) by others.",
        inputs=("x",),
        attributes={
            "dim": "the dimension that is split",
            "size": "its size on this device afterwards",
            "whole": "its size over all devices",
            "from": "shares of all devices before",
            "to": "shares of all devices afterwards",
        },
        shapes=_reshared_shapes,
        boundary=True,
    ),
)
