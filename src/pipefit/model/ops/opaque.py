"""opaque(inputs..., parameters...): a user's module that could not be captured. Replicated, with a fused backward.

Its costs are estimates: 2 FLOPs per parameter and token forward and twice that backward (Kaplan et al., 2020, section
2.1), all of it in the I action. It is assumed to save its inputs and `kept_factor` times its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape
from pipefit.model.ops.kind import Flops, OperatorCall, OperatorKind


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    return (tuple(attributes["shape"]),)


def _count_flops(call: OperatorCall) -> Flops:
    tokens = call.symbols["B"] * call.symbols["T"]
    forward = 2 * tokens * int(call.attributes["parameter_count"])
    return Flops(forward, 2 * forward, 0)


def _saved_values(operator: Operator, needs_gradient: Callable[[str], bool]) -> tuple[str, ...]:
    return tuple(name for name in operator.inputs if name)


def _own_bytes(call: OperatorCall) -> int:
    return math.ceil(float(call.attributes["kept_factor"]) * math.prod(call.outputs[0]) * call.compute_bytes)


OPERATORS = (
    OperatorKind(
        kind="opaque",
        summary="A user's module, called as it is.",
        inputs=("inputs_and_parameters*",),
        attributes={
            "key": "name under which the runtime finds the module: the layer's name",
            "inputs": "how many of the inputs are values; the rest are parameters, by local name",
            "shape": "shape of the output",
            "parameter_count": "numbers in its parameters",
            "kept_factor": "estimate of its saved activations, in units of its output",
            "reason": "why it could not be captured",
            "tokenwise": "whether the layer's class says that a token's output depends on that token alone",
            "suspects": "PyTorch's modules inside that draw random numbers or mix tokens: [`random`, `mixes`; which]",
        },
        shapes=_output_shapes,
        flops=_count_flops,
        saves=_saved_values,
        own_bytes=_own_bytes,
        boundary=True,
        heavy=True,
        is_module=True,
        output_dtype="compute",
    ),
)
