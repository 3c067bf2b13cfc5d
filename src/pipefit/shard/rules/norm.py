"""rms_norm, layer_norm, softmax: split by every dimension; along the normalised one, devices exchange sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import DevicePart, OperatorLabels, leading_labels


def label_norm(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    last = len(outputs[0]) - 1
    labels = (*leading_labels(last + 1)[:-1], "features")

    def set_whole_size(attributes: Mapping[str, Any], shape: Shape, cut: DevicePart) -> Mapping[str, Any]:
        """Return the attribute `whole`, if features are split."""
        return {**attributes, "whole": cut.total} if cut.dim == last else attributes

    return OperatorLabels(
        inputs=(labels, *(None if shape is None else ("features",) for shape in inputs[1:])),
        outputs=(labels,),
        units={},
        kinds={"features": f"{operator.kind}_shard"},
        local=set_whole_size,
    )


def label_softmax(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    rank = len(outputs[0])
    labels = tuple(f"d{i}" for i in range(rank))
    along = f"d{int(operator.attributes['dim']) % rank}"
    return OperatorLabels(inputs=(labels,), outputs=(labels,), units={}, kinds={along: "softmax_shard"})


RULES = {"rms_norm": label_norm, "layer_norm": label_norm, "softmax": label_softmax}
