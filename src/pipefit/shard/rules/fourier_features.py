"""fourier_features: split by rows or tokens."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import OperatorLabels, leading_labels


def fourier_features(
    operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]
) -> OperatorLabels:
    labels = leading_labels(len(outputs[0]))
    return OperatorLabels(inputs=(labels[:-1],), outputs=(labels,), units={})


RULES = {"fourier_features": fourier_features}
