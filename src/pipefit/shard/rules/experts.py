"""experts: split by tokens, which are independent, or by experts, whose results are addends of the output."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labels, OperatorLabels, leading_labels, whole_labels
from pipefit.shard.rules.moe import own_experts


def label_experts(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    x = inputs[0]
    assert x is not None
    tokens, weights = leading_labels(len(x)), ("experts", None, None)
    further: list[Labels | None] = [("experts", None) if shape else whole_labels(shape) for shape in inputs[5:]]
    return OperatorLabels(
        inputs=(tokens, tokens, tokens, weights, weights, *further),
        outputs=(tokens,),
        units={},
        addend=own_experts,
    )


RULES = {"experts": label_experts}
