"""The dimensions of a layer's values that can be split over a shard axis, and the number of units of each.

Operators tie dimensions together: the columns of a projection, the heads that they become, the groups of an attention.
All tied dimensions form one class. A class is cut into one number of units that divides all of them, so all its tensors
are cut at the same places.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from pipefit.model.graph import Graph, Size, shapes_of
from pipefit.shard.choice import LOCAL
from pipefit.shard.program import labels_at

Place = tuple[str, int]
"""(value or parameter, dimension)."""

DIMENSIONS = 6
"""Number of leading dimensions that may be split: the search has no more forms (`frontier.py`)."""


def cut_units(graph: Graph) -> Mapping[Place, int]:
    """Return the units of every dimension that can be split; 0 for rows and tokens, which are cut at run time."""
    shapes = shapes_of(graph)
    parent: dict[Place, Place] = {}
    numbers: dict[Place, list[Size]] = {}

    def find_root(dimension: Place) -> Place:
        while parent.setdefault(dimension, dimension) != dimension:
            dimension = parent[dimension]
        return dimension

    for operator in graph.operators:
        labelled = labels_at(shapes, operator)
        places: dict[str, list[Place]] = {}
        names = (*operator.inputs, *operator.outputs)
        for name, labels in zip(names, (*labelled.inputs, *labelled.outputs), strict=True):
            for dim, label in enumerate(labels or ()):
                if name and label is not None:
                    places.setdefault(label, []).append((name, dim))
        for label, tied in places.items():
            for dimension in tied:
                parent[find_root(dimension)] = find_root(tied[0])
            if label in labelled.units:
                numbers.setdefault(tied[0], []).append(labelled.units[label])
    for name, shape in shapes.items():
        for dim, size in enumerate(shape):
            numbers.setdefault((name, dim), []).append(size)
    classes: dict[Place, list[Size]] = {}
    for dimension, sizes in numbers.items():
        if dimension in parent:
            classes.setdefault(find_root(dimension), []).extend(sizes)
    units = {root: _common_units(sizes) for root, sizes in classes.items()}
    return {
        dimension: count
        for dimension in parent
        if dimension[1] < DIMENSIONS and (count := units[find_root(dimension)]) is not None
    }


def _common_units(sizes: list[Size]) -> int | None:
    """Return one number of units for dimensions of these sizes, or None if there is none."""
    if {*sizes} <= {*LOCAL}:
        return 0 if len({*sizes}) == 1 else None
    fixed_sizes = [size for size in sizes if isinstance(size, int)]
    return gcd(*fixed_sizes) if len(fixed_sizes) == len(sizes) else None
