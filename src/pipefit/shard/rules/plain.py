"""constant: whole. expand: the dimensions that stay, and those that are repeated. sum: every dimension; over one that
is summed the result is partial."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labelled
from pipefit.shard.rules.shape import local_shape


def constant(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    return Labelled(inputs=(), outputs=((None,) * len(outputs[0]),), units={})


def expand(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    x, y = inputs[0], outputs[0]
    assert x is not None
    offset = len(y) - len(x)
    before = tuple(f"d{i + offset}" if size == y[i + offset] and size != 1 else None for i, size in enumerate(x))
    after = tuple(None if size == 1 else f"d{i}" for i, size in enumerate(y))
    return Labelled(inputs=(before,), outputs=(after,), units={}, linear=((0,),), local=local_shape)


def total(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    x, dims, keepdim = inputs[0], operator.attributes["dims"], operator.attributes["keepdim"]
    assert x is not None
    before = tuple(f"d{i}" for i in range(len(x)))
    after = tuple(None if i in dims else f"d{i}" for i in range(len(x)) if keepdim or i not in dims)
    return Labelled(inputs=(before,), outputs=(after,), units={}, linear=((0,),))


RULES = {"constant": constant, "expand": expand, "sum": total}
