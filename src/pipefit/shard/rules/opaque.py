"""opaque: a user's module of unknown computation is replicated on every device."""

from __future__ import annotations

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import OperatorLabels, whole_labels


def label_opaque(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    return OperatorLabels(
        inputs=tuple(map(whole_labels, inputs)), outputs=tuple((None,) * len(shape) for shape in outputs), units={}
    )


RULES = {"opaque": label_opaque}
