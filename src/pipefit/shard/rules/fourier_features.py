"""fourier_features: by rows or tokens."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labelled, leading


def fourier_features(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    labels = leading(len(outputs[0]))
    return Labelled(inputs=(labels[:-1],), outputs=(labels,), units={})


RULES = {"fourier_features": fourier_features}
