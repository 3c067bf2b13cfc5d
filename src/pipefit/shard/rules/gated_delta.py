"""gated_delta: split by rows, or by heads. A unit of heads is one head of keys with all heads of values that it serves.

Tokens are not split: every token reads the state that all tokens before it leave.
"""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import OperatorLabels


def label_gated_delta(
    operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]
) -> OperatorLabels:
    k = inputs[1]
    assert k is not None
    features, numbers = ("d0", None, "heads", None), ("d0", None, "heads")
    by_rank = {4: features, 3: numbers}
    return OperatorLabels(
        inputs=tuple(by_rank[len(shape)] for shape in inputs if shape is not None),
        outputs=(features,),
        units={"heads": int(k[2])},
    )


RULES = {"gated_delta": label_gated_delta}
