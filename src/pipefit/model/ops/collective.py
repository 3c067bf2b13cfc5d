"""Collectives over the shard axis, put into a graph by a shard program. Their costs stand in `cost/`.

What a backward pass does follows the forms: all_gather <-> reduce_scatter, all_reduce <-> all_reduce; shard_slice (I
to G) moves nothing either way, because the gradient of what is whole is a partial sum: its own part, and zeros. They
keep nothing, and are not run again under selective recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Shape
from pipefit.model.ops.kind import OperatorKind, same_shape


def _resized_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    x, dim = inputs[0], attributes["dim"]
    assert x is not None
    return ((*x[:dim], attributes["size"], *x[dim + 1 :]),)


_SIZED = {"dim": "the dimension that grows or shrinks", "size": "its size on this device afterwards"}

OPERATORS = (
    OperatorKind(
        kind="all_gather",
        summary="G(dim) to I.",
        inputs=("x",),
        attributes=_SIZED,
        shapes=_resized_shapes,
        boundary=True,
    ),
    OperatorKind(
        kind="reduce_scatter",
        summary="P to G(dim).",
        inputs=("x",),
        attributes=_SIZED,
        shapes=_resized_shapes,
        boundary=True,
    ),
    OperatorKind(kind="all_reduce", summary="P to I.", inputs=("x",), shapes=same_shape, boundary=True),
    OperatorKind(
        kind="shard_slice",
        summary="I to G(dim).",
        inputs=("x",),
        attributes=_SIZED,
        shapes=_resized_shapes,
        boundary=True,
    ),
)
