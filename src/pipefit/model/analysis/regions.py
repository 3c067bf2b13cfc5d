"""Pointwise regions: the operators between two boundaries (linear layers, attention, collectives, loss). Pure.

`run/autograd/regions.py` runs them; which values stay of them is decided in `saved.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipefit.model.graph import Graph
from pipefit.model.ops.table import KINDS


@dataclass(frozen=True, slots=True)
class OperatorRegion:
    """Connected pointwise operators that can run at one point of the layer."""

    operators: tuple[int, ...]
    inputs: tuple[str, ...]
    "Values from outside in order of first use, parameters and inputs from the step plan among them."
    outputs: tuple[str, ...]
    "Values that something outside uses."


def arrange_regions(graph: Graph, members: Sequence[int]) -> list[int | OperatorRegion]:
    """The operators of a graph in an order of execution in which `members` (none of them a boundary) stand together
    in regions as large as possible.

    Two members belong together if one feeds the other and no boundary lies between them on any path. Members must
    not depend on pointwise operators that are no members, unless a boundary lies between.
    """
    chosen = set(members)
    level = boundary_levels(graph)
    boundary = [KINDS[operator.kind].boundary for operator in graph.operators]
    produced = {name: i for i, operator in enumerate(graph.operators) for name in operator.outputs}
    root = {place: place for place in chosen}

    def find_root(place: int) -> int:
        while root[place] != place:
            place = root[place]
        return place

    for place in sorted(chosen):
        for name in graph.operators[place].inputs:
            source = produced.get(name, -1)
            if source in chosen and level[source] == level[place]:
                root[find_root(place)] = find_root(source)
    groups: dict[int, list[int]] = {}
    for place in sorted(chosen):
        groups.setdefault(find_root(place), []).append(place)
    items: list[tuple[tuple[int, int, int], int | OperatorRegion]] = []
    for group in groups.values():
        items.append(((level[group[0]], 0, group[0]), make_region(graph, group)))
    for place in range(len(graph.operators)):
        if place not in chosen:
            items.append(((level[place], 2 if boundary[place] else 1, place), place))
    return [item for _, item in sorted(items, key=lambda item: item[0])]


def boundary_levels(graph: Graph) -> list[int]:
    """For every operator, the largest number of boundaries on a path that leads to it."""
    height: dict[str, int] = {}
    result = []
    for operator in graph.operators:
        here = max((height.get(name, 0) for name in operator.inputs if name), default=0)
        result.append(here)
        for name in operator.outputs:
            height[name] = here + KINDS[operator.kind].boundary
    return result


def make_region(graph: Graph, places: Sequence[int]) -> OperatorRegion:
    inside = set(places)
    made = [name for place in places for name in graph.operators[place].outputs]
    used = [name for place in places for name in graph.operators[place].inputs if name]
    outside = {
        name for i, operator in enumerate(graph.operators) if i not in inside for name in operator.inputs if name
    }
    outside |= set(graph.outputs)
    return OperatorRegion(
        operators=tuple(places),
        inputs=tuple(dict.fromkeys(name for name in used if name not in made)),
        outputs=tuple(name for name in made if name in outside),
    )
