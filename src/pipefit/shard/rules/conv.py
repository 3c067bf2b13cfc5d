"""conv, conv_transpose: split by rows, by output channels, or by input channels (-> P).

With groups: split by rows, or by groups of input and output channels. Spatial dimensions are not split: parts of an
image would need their neighbours' edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.shard.rules import DevicePart, Labels, OperatorLabels


def label_conv(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    x, weight, bias = inputs
    assert x is not None and weight is not None
    groups = int(operator.attributes["groups"])
    kernel: Labels = (None,) * (len(x) - 2)
    into, out = ("in", "out") if groups == 1 else ("groups", "groups")
    first, second = (into, out) if operator.kind == "conv_transpose" else (out, into)
    return OperatorLabels(
        inputs=(
            ("d0", into, *kernel),
            (first, second if groups == 1 else None, *kernel),
            None if bias is None else (out,),
        ),
        outputs=(("d0", out, *kernel),),
        units={} if groups == 1 else {"groups": groups},
        once=(2,),
        linear=((0,),) if bias is None else (),
        local=None if groups == 1 else fewer_groups,
    )


def fewer_groups(attributes: Mapping[str, Any], shape: Shape, cut: DevicePart) -> Mapping[str, Any]:
    """Return the groups of this device's channels."""
    if cut.dim != 1:
        return attributes
    assert isinstance(cut.total, int) and isinstance(shape[1], int)
    return {**attributes, "groups": attributes["groups"] * shape[1] // cut.total}


RULES = {"conv": label_conv, "conv_transpose": label_conv}
