"""constant() -> known numbers: tables of rotary embeddings, positions, masks. Computed once and kept with the
program."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipefit.model.graph import Shape
from pipefit.model.ops.kind import OperatorKind

LISTED_NUMBERS = 1 << 16
"""Numbers of a constant that stand in a list. More of them are text: a digest of a million numbers takes seconds,
and every layer has its own."""

_PACKED_TYPES = ("i1", "<i4", "<f4", "<f8")
"""NumPy types of packed numbers: the first one that holds all of them."""


def pack_numbers(numbers: np.ndarray) -> list[float] | str:
    """Return the attribute `values` of numbers in float64 and in order: a list, or `TYPE:BASE64` of their bytes."""
    if numbers.size <= LISTED_NUMBERS:
        return list(numbers.tolist())
    with np.errstate(invalid="ignore", over="ignore"):
        packed = {name: numbers.astype(name) for name in _PACKED_TYPES}
        exact = [name for name in _PACKED_TYPES if np.array_equal(packed[name].astype(float), numbers, equal_nan=True)]
    return f"{exact[0]}:{base64.b64encode(packed[exact[0]].tobytes()).decode()}"


def unpack_numbers(values: list[float] | str) -> np.ndarray:
    """Return the numbers of an attribute `values` in float64, without a shape; not for `causal`."""
    if not isinstance(values, str):
        return np.array(values, dtype=float)
    name, _, text = values.partition(":")
    return np.frombuffer(base64.b64decode(text), dtype=name).astype(float)


def _output_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    return (tuple(attributes["shape"]),)


OPERATORS = (
    OperatorKind(
        kind="constant",
        summary="Known numbers.",
        inputs=(),
        attributes={
            "values": (
                "all numbers in order (0 and 1 for bool), more than 65,536 as `TYPE:BASE64` of their bytes; "
                "or `causal`: key j is seen by query i where j <= i"
            ),
            "shape": "list of integers",
            "dtype": "`compute`, `float32`, `int64`, `int32` or `bool`",
        },
        shapes=_output_shapes,
        output_dtype="attribute",
    ),
)
