"""aten: split along the dimensions known to be independent (`model/analysis/aten_splits`); otherwise replicated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.analysis.aten_splits import split_labels
from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import DevicePart, OperatorLabels, whole_labels


def label_aten(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    known = split_labels(operator.attributes, [shape for shape in inputs if shape is not None])
    if known is None:
        return OperatorLabels(inputs=tuple(map(whole_labels, inputs)), outputs=((None,) * len(outputs[0]),), units={})
    if not known.groups:
        return OperatorLabels(inputs=known.inputs, outputs=(known.result,), units={})
    dim = known.result.index("groups")

    def fewer_groups(attributes: Mapping[str, Any], shape: Shape, cut: DevicePart) -> Mapping[str, Any]:
        """Return the call with the groups of this device's part."""
        if cut.dim != dim:
            return attributes
        part = shape[dim]
        assert isinstance(cut.total, int) and isinstance(part, int)
        arguments = [*attributes["arguments"]]
        arguments[known.argument] = known.groups * part // cut.total
        return {**attributes, "arguments": arguments}

    return OperatorLabels(
        inputs=known.inputs, outputs=(known.result,), units={"groups": known.groups}, local=fewer_groups
    )


RULES = {"aten": label_aten}
