"""rms_norm, layer_norm, softmax: every dimension but the one that is normalised."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import Labelled, leading, whole


def norm(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    labels = leading(len(outputs[0]))
    return Labelled(inputs=(labels, *map(whole, inputs[1:])), outputs=(labels,), units={})


def softmax(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    rank = len(outputs[0])
    dim = int(operator.attributes["dim"]) % rank
    labels = tuple(None if i == dim else f"d{i}" for i in range(rank))
    return Labelled(inputs=(labels,), outputs=(labels,), units={})


RULES = {"rms_norm": norm, "layer_norm": norm, "softmax": softmax}
