"""experts: split by tokens, which are independent, or by experts, whose results are addends of the output."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labels, OperatorLabels, leading_labels
from pipefit.shard.rules.moe import own_experts


def label_experts(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    x = inputs[0]
    assert x is not None
    tokens = leading_labels(len(x))

    def label_experts_of(shape: Shape | None) -> Labels | None:
        return None if shape is None else ("experts", *(None,) * (len(shape) - 1))

    return OperatorLabels(
        inputs=(tokens, tokens, tokens, *map(label_experts_of, inputs[3:])),
        outputs=(tokens,),
        units={"experts": int(operator.attributes["experts"])},
        addend=own_experts,
    )


RULES = {"experts": label_experts}
