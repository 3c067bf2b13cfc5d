"""Regions: the pointwise operators between two boundaries (linear layers, attention, collectives, loss), or one gather.

`run/autograd/regions.py` runs them; `saved.py` decides which of their values are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipefit.model.graph import Graph
from pipefit.model.ops.table import KINDS


@dataclass(frozen=True, slots=True)
class OperatorRegion:
    """Connected pointwise operators, or one gather, that can run at one point of the layer."""

    operators: tuple[int, ...]
    inputs: tuple[str, ...]
    "Values from outside the region in order of first use, including parameters and inputs from the step plan."
    outputs: tuple[str, ...]
    "Values that are used outside the region."


def arrange_regions(graph: Graph, members: Sequence[int]) -> list[int | OperatorRegion]:
    """Return the operators of a graph in an execution order in which `members` form regions of maximal size.

    Two members belong together if one feeds the other and no boundary lies between them on any path. A boundary among
    them (`OperatorKind.reruns`) is a region of its own. Members must not depend on pointwise operators outside
    `members`, unless a boundary lies between.
    """
    chosen = set(members)
    level = boundary_levels(graph)
    boundary = [KINDS[operator.kind].boundary for operator in graph.operators]
    produced = {name: i for i, operator in enumerate(graph.operators) for name in operator.outputs}
    root = {index: index for index in chosen}

    def find_root(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    for index in sorted(chosen):
        for name in () if boundary[index] else graph.operators[index].inputs:
            source = produced.get(name, -1)
            if source in chosen and not boundary[source] and level[source] == level[index]:
                root[find_root(index)] = find_root(source)
    groups: dict[int, list[int]] = {}
    for index in sorted(chosen):
        groups.setdefault(find_root(index), []).append(index)
    items: list[tuple[tuple[int, int, int], int | OperatorRegion]] = []
    for group in groups.values():
        items.append(((level[group[0]], 0, group[0]), make_region(graph, group)))
    for index in range(len(graph.operators)):
        if index not in chosen:
            items.append(((level[index], 2 if boundary[index] else 1, index), index))
    return [item for _, item in sorted(items, key=lambda item: item[0])]


def boundary_levels(graph: Graph) -> list[int]:
    """The largest number of boundaries on a path to each operator."""
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
    produced = [name for index in places for name in graph.operators[index].outputs]
    used = [name for index in places for name in graph.operators[index].inputs if name]
    outside = {
        name for i, operator in enumerate(graph.operators) if i not in inside for name in operator.inputs if name
    }
    outside |= set(graph.outputs)
    return OperatorRegion(
        operators=tuple(places),
        inputs=tuple(dict.fromkeys(name for name in used if name not in produced)),
        outputs=tuple(name for name in produced if name in outside),
    )
