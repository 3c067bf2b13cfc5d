"""moe: split by rows or tokens, because no token is dropped and tokens are independent; or by experts.

There are two splits by experts. In the first, every device computes its own experts for all tokens, an addend of the
result (tokens gathered before, sums scattered after). In the second, every device has its tokens and its experts, and
sends tokens to their experts and back (`moe_shard`: GShard, Lepikhin et al., 2020). The second moves top_k / devices of
the first's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import DevicePart, Labels, OperatorLabels, leading_labels, whole_labels


def label_moe(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    x, router = inputs[:2]
    assert x is not None
    labels = leading_labels(len(x))
    experts = ("experts", None, None)
    names = operator.attributes.get("more", ())
    joint: dict[str, Any] = {}

    def label_further(label: str) -> tuple[Labels | None, ...]:
        """Return the labels of further inputs: biases of experts are divided with them."""
        return tuple(
            (label, None) if name in ("gate_up_bias", "down_bias") else whole_labels(shape)
            for name, shape in zip(names, inputs[4:], strict=True)
        )

    for dim, size in enumerate(x[:2]):
        if size == ("B", "T")[dim]:
            label = f"experts{dim}"
            tokens: Labels = tuple(label if index == dim else None for index in range(len(x)))
            joint[label] = (
                (tokens, whole_labels(router), (label, None, None), (label, None, None), *label_further(label)),
                (tokens,),
            )
    return OperatorLabels(
        inputs=(labels, whole_labels(router), experts, experts, *label_further("experts")),
        outputs=(labels,),
        units={},
        kinds=dict.fromkeys(joint, "moe_shard"),
        joint=joint,
        addend=own_experts,
    )


def own_experts(attributes: Mapping[str, Any], cut: DevicePart) -> Mapping[str, Any]:
    """Return the attribute `first`: the first expert with its weights on this device."""
    return {**attributes, "first": cut.start // int(attributes.get("rows", 1))}


RULES = {"moe": label_moe}
