"""reshape, transpose, slice, concat: split by dimensions that the output keeps.

A reshape is divided into groups of dimensions of equal product; in a group, the first dimension of each side can be
split together: (B, T, H*K) to (B, T, H, K) splits H*K in units of K, giving H units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape, Size, multiply_sizes
from pipefit.shard.rules import DevicePart, Labels, OperatorLabels


def label_reshape(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    x, y = inputs[0], outputs[0]
    assert x is not None
    before: list[str | None] = [None] * len(x)
    after: list[str | None] = [None] * len(y)
    units = {}
    for number, (left, right) in enumerate(factor_groups(x, y)):
        i = next((dim for dim in left if x[dim] != 1), left.start)  # leading dimensions may be 1
        j = next((dim for dim in right if y[dim] != 1), right.start)
        before[i] = after[j] = f"g{number}"
        sizes = [size for size in (x[i], y[j]) if isinstance(size, int)]
        if len(left) + len(right) > 2 and sizes:
            units[f"g{number}"] = min(sizes)
    return OperatorLabels(
        inputs=(tuple(before),), outputs=(tuple(after),), units=units, linear=((0,),), local=local_shape
    )


def local_shape(attributes: Mapping[str, Any], shape: Shape, cut: DevicePart) -> Mapping[str, Any]:
    return {**attributes, "shape": list(shape)}


def factor_groups(x: Shape, y: Shape) -> list[tuple[range, range]]:
    """Return the shortest consecutive ranges of dimensions of x and y with equal products."""
    groups = []
    i = j = 0
    while i < len(x) and j < len(y):
        first = i, j
        left, right = _size_at(x, i), _size_at(y, j)
        i, j = i + 1, j + 1
        while left != right:
            if (_size_order(left) <= _size_order(right) and i < len(x)) or j >= len(y):
                left, i = multiply_sizes(left, x[i]), i + 1
            else:
                right, j = multiply_sizes(right, y[j]), j + 1
        groups.append((range(first[0], i), range(first[1], j)))
    return groups


def _size_at(shape: Shape, index: int) -> Size:
    return multiply_sizes(shape[index])


def _size_order(size: Size) -> tuple[int, int]:
    """Return a sort key: fewer symbols first, then smaller numbers."""
    factors = str(size).split("*")
    number = 1
    for factor in factors:
        number *= int(factor) if factor.isdigit() else 1
    return sum(not factor.isdigit() for factor in factors), number


def label_transpose(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> OperatorLabels:
    dims = operator.attributes["dims"]
    before = tuple(f"d{i}" for i in range(len(dims)))
    return OperatorLabels(inputs=(before,), outputs=(tuple(before[dim] for dim in dims),), units={}, linear=((0,),))


def label_unsplit_dim(
    operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]
) -> OperatorLabels:
    dim = int(operator.attributes["dim"])
    labels: Labels = tuple(None if i == dim else f"d{i}" for i in range(len(outputs[0])))
    all_inputs = tuple(range(len(inputs)))
    return OperatorLabels(inputs=tuple(labels for _ in inputs), outputs=(labels,), units={}, linear=(all_inputs,))


RULES = {
    "reshape": label_reshape,
    "transpose": label_transpose,
    "slice": label_unsplit_dim,
    "concat": label_unsplit_dim,
}
