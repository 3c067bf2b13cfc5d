"""linear: split by rows or tokens (x), by columns (weight G0), or by contraction (x G(last), weight G1 -> P).

Without a bias, partial sums in x pass through.
"""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import OperatorLabels


def label_linear(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    x, bias = inputs[0], inputs[2]
    assert x is not None
    front = tuple(f"d{i}" for i in range(len(x) - 1))
    return OperatorLabels(
        inputs=((*front, "in"), ("out", "in"), None if bias is None else ("out",)),
        outputs=((*front, "out"),),
        units={},
        once=(2,),
        linear=((0,),) if bias is None else (),
    )


RULES = {"linear": label_linear}
