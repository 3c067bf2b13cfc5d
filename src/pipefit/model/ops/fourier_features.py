"""fourier_features(time_BT) -> (B, T, 2K): cosines, then sines of a time in [0, 1] at K frequencies.

Frequency k is 1000 / 10000^(k / K): the features of diffusion transformers (Peebles and Xie, 2023, after Vaswani et
al., 2017), whose times run from 0 to 1000. Computed in float32 or wider, the dtype of the times.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from pipefit.model.graph import Shape
from pipefit.model.ops.kind import OperatorCall, OperatorKind


def fourier_frequencies(count: int) -> list[float]:
    """The K frequencies, in radians per unit of time, highest first."""
    return [1000.0 * 10000.0 ** (-k / count) for k in range(count)]


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    time = inputs[0]
    assert time is not None
    return ((*time, 2 * int(attributes["frequencies"])),)


def _own_bytes(call: OperatorCall) -> int:
    """The angles, saved if the gradient of a time is needed."""
    return prod(call.outputs[0]) // 2 * call.wide_bytes


OPERATORS = (
    OperatorKind(
        kind="fourier_features",
        summary="Cosines and sines of a time at fixed frequencies.",
        inputs=("time",),
        attributes={"frequencies": "how many"},
        shapes=_output_shapes,
        own_bytes=_own_bytes,
        output_dtype="float32",
    ),
)
