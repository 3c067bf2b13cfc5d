"""Kinds that move or rename numbers: reshape, transpose, slice (views), cast and concat (copies). They save nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from pipefit.model.graph import Shape, add_sizes, has_tokens, size_factors, size_value, subtract_sizes
from pipefit.model.ops.kind import OperatorKind, same_shape

_SOME_ROWS = 7919
"""Value of B in comparisons of distances: a prime that no model size equals."""


def _reshape_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    return (tuple(attributes["shape"]),)


def _transpose_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    x = inputs[0]
    assert x is not None
    return (tuple(x[dim] for dim in attributes["dims"]),)


def _slice_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    x, dim = inputs[0], attributes["dim"]
    assert x is not None
    return ((*x[:dim], subtract_sizes(attributes["stop"], attributes["start"]), *x[dim + 1 :]),)


def _concat_shapes(inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    first, dim = inputs[0], attributes["dim"]
    assert first is not None
    total = add_sizes(*(shape[dim] for shape in inputs if shape is not None))
    return ((*first[:dim], total, *first[dim + 1 :]),)


def _mixed_along(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> str:
    x = inputs[0]
    return "along the tokens" if has_tokens(x[int(attributes["dim"])]) and output != x else ""


def _mixed_by_reshape(attributes: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> str:
    return "" if _keeps_tokens(inputs[0], output) else "that puts tokens together with features"


def _keeps_tokens(before: Shape, after: Shape) -> bool:
    """Return True if adjacent tokens keep their distance in memory, so that the numbers of one token stay together. A
    dimension of tokens times a number allows a range of distances."""

    def token_distance(shape: Shape) -> tuple[int, int]:
        token_dim = max(index for index, size in enumerate(shape) if has_tokens(size))
        least = prod(size_value(size, {"B": _SOME_ROWS}) for size in shape[token_dim + 1 :])
        return least, least * size_factors(str(shape[token_dim]))[0]

    old, new = token_distance(before), token_distance(after)
    return old[0] <= new[1] and new[0] <= old[1]


def _add_nothing(attributes: Mapping[str, Any]) -> float:
    return 0.0


OPERATORS = (
    OperatorKind(
        kind="reshape",
        summary="The same numbers in order under another shape.",
        inputs=("x",),
        attributes={"shape": "list of sizes"},
        shapes=_reshape_shapes,
        view=True,
        mixes_tokens=_mixed_by_reshape,
        added_number=_add_nothing,
    ),
    OperatorKind(
        kind="transpose",
        summary="Dimensions permuted.",
        inputs=("x",),
        attributes={"dims": "permutation of all dimensions: output dimension i is input dimension dims[i]"},
        shapes=_transpose_shapes,
        view=True,
    ),
    OperatorKind(
        kind="slice",
        summary="x[start:stop] along one dimension.",
        inputs=("x",),
        attributes={"dim": "not negative", "start": "first index", "stop": "one past the last"},
        shapes=_slice_shapes,
        view=True,
        mixes_tokens=_mixed_along,
    ),
    OperatorKind(
        kind="concat",
        summary="Inputs joined along one dimension.",
        inputs=("x*",),
        attributes={"dim": "not negative"},
        shapes=_concat_shapes,
        mixes_tokens=_mixed_along,
    ),
    OperatorKind(
        kind="cast",
        summary="Another number type: `compute`, or `float32` which means float32 or wider. No copy where it is equal.",
        inputs=("x",),
        attributes={"dtype": "`compute` or `float32`"},
        shapes=same_shape,
        output_dtype="attribute",
        added_number=_add_nothing,
    ),
)
