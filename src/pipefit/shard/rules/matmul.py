"""matmul of equal ranks: split by common leading dimensions, rows of a, columns of b, or contraction (-> P)."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import OperatorLabels


def label_matmul(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    a, b = inputs
    assert a is not None and b is not None
    rank = len(outputs[0])
    front_a = tuple(f"d{rank - len(a) + i}" for i in range(len(a) - 2))
    front_b = tuple(f"d{rank - len(b) + i}" for i in range(len(b) - 2))
    front = front_a if len(a) >= len(b) else front_b
    return OperatorLabels(
        inputs=((*front_a, "rows", "inner"), (*front_b, "inner", "columns")),
        outputs=((*front, "rows", "columns"),),
        units={},
        linear=((0,), (1,)),
    )


RULES = {"matmul": label_matmul}
