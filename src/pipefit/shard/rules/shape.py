"""reshape, transpose, slice, concat: where each dimension of the input comes out again.

A reshape is cut into groups of dimensions of equal product; within a group, the first dimension of each side can be
split together: (B, T, H*K) to (B, T, H, K) splits H*K in units of K, which is H.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.graph import Operator, Shape, Size, multiply_sizes
from pipefit.shard.rules import Cut, Labelled, Labels


def reshape(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    x, y = inputs[0], outputs[0]
    assert x is not None
    before: list[str | None] = [None] * len(x)
    after: list[str | None] = [None] * len(y)
    units = {}
    for number, (left, right) in enumerate(factor_groups(x, y)):
        i = next((dim for dim in left if x[dim] != 1), left.start)  # dimensions of one may stand in front
        j = next((dim for dim in right if y[dim] != 1), right.start)
        before[i] = after[j] = f"g{number}"
        sizes = [size for size in (x[i], y[j]) if isinstance(size, int)]
        if len(left) + len(right) > 2 and sizes:
            units[f"g{number}"] = min(sizes)
    return Labelled(inputs=(tuple(before),), outputs=(tuple(after),), units=units, linear=((0,),), local=local_shape)


def local_shape(attributes: Mapping[str, Any], shape: Shape, cut: Cut) -> Mapping[str, Any]:
    return {**attributes, "shape": list(shape)}


def factor_groups(x: Shape, y: Shape) -> list[tuple[range, range]]:
    """Ranges of dimensions of x and y with equal products, as short as possible, in order."""
    groups = []
    i = j = 0
    while i < len(x) and j < len(y):
        first = i, j
        left, right = _advance(x, i), _advance(y, j)
        i, j = i + 1, j + 1
        while left != right:
            if (_extent(left) <= _extent(right) and i < len(x)) or j >= len(y):
                left, i = multiply_sizes(left, x[i]), i + 1
            else:
                right, j = multiply_sizes(right, y[j]), j + 1
        groups.append((range(first[0], i), range(first[1], j)))
    return groups


def _advance(shape: Shape, index: int) -> Size:
    return multiply_sizes(shape[index])


def _extent(size: Size) -> tuple[int, int]:
    """An order in which fewer symbols, then a smaller number, come first."""
    factors = str(size).split("*")
    number = 1
    for factor in factors:
        number *= int(factor) if factor.isdigit() else 1
    return sum(not factor.isdigit() for factor in factors), number


def transpose(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    dims = operator.attributes["dims"]
    before = tuple(f"d{i}" for i in range(len(dims)))
    return Labelled(inputs=(before,), outputs=(tuple(before[dim] for dim in dims),), units={}, linear=((0,),))


def along(operator: Operator, inputs: tuple[Shape | None, ...], outputs: tuple[Shape, ...]) -> Labelled:
    dim = int(operator.attributes["dim"])
    labels: Labels = tuple(None if i == dim else f"d{i}" for i in range(len(outputs[0])))
    every = tuple(range(len(inputs)))
    return Labelled(inputs=tuple(labels for _ in inputs), outputs=(labels,), units={}, linear=(every,))


RULES = {"reshape": reshape, "transpose": transpose, "slice": along, "concat": along}
