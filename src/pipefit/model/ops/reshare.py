"""reshare over the shard axis: what was split by some shares is split along the same dimension by others afterwards.

It stands where layers with shares of their own meet; every device sends what is no longer its own straight to whose it
is. Its backward is the way back. Like other collectives it keeps nothing and is not run again under selective
recomputation. Rows and tokens of the shares that are not the layer's own are counted as if they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import OperatorKind

KIND = "reshare"


def shares_of(operator: Operator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Everyone's shares before and afterwards."""
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
            "from": "everyone's shares before",
            "to": "and afterwards",
        },
        shapes=_reshared_shapes,
        boundary=True,
    ),
)
