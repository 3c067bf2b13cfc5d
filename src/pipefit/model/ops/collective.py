"""Collectives over the shard axis, inserted into a graph by a shard program. `cost/` holds their costs.

The backward follows the forms: all_gather <-> reduce_scatter, all_reduce <-> all_reduce. shard_slice (replicated to
sharded) moves nothing in either direction: the gradient of a replicated tensor is a partial sum, here the device's own
part and zeros. Collectives save nothing. Selective recomputation gathers again what a backward needs, and keeps the
device's part (Korthikanti et al., 2022, section 4.2.2); it runs no other collective again.
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
        reruns=True,
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
