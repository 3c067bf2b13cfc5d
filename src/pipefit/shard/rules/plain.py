"""constant: replicated. expand: split by kept and by repeated dimensions. sum: split by every dimension; a split of a
summed dimension gives a partial sum.
"""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import OperatorLabels
from pipefit.shard.rules.shape import local_shape


def label_constant(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    return OperatorLabels(inputs=(), outputs=((None,) * len(outputs[0]),), units={})


def label_expand(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    x, y = inputs[0], outputs[0]
    assert x is not None
    offset = len(y) - len(x)
    before = tuple(f"d{i + offset}" if size == y[i + offset] and size != 1 else None for i, size in enumerate(x))
    after = tuple(None if size == 1 else f"d{i}" for i, size in enumerate(y))
    return OperatorLabels(inputs=(before,), outputs=(after,), units={}, linear=((0,),), local=local_shape)


def label_sum(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    x, dims, keepdim = inputs[0], operator.attributes["dims"], operator.attributes["keepdim"]
    assert x is not None
    before = tuple(f"d{i}" for i in range(len(x)))
    after = tuple(None if i in dims else f"d{i}" for i in range(len(x)) if keepdim or i not in dims)
    return OperatorLabels(inputs=(before,), outputs=(after,), units={}, linear=((0,),))


RULES = {"constant": label_constant, "expand": label_expand, "sum": label_sum}
