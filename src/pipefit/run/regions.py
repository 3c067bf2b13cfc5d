"""Pointwise regions: the operators between two boundaries (linear layers, attention, collectives, loss).

Two uses. Selective recomputation keeps what goes into a region and runs the region again in the backward, once,
however many linear layers read its results (reference: selective activation recomputation, Korthikanti et al., 2022,
taken from attention to everything that is cheap). And on GPUs every region becomes one compiled function.
Which values are kept is decided in `model/ops/saved.py`, so that the planner's bytes and ours agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipefit.model.graph import Graph
from pipefit.model.ops import KINDS
from pipefit.run.stage_engine import run_backward


@dataclass(frozen=True, slots=True)
class Region:
    """Connected pointwise operators that can run at one point of the layer."""

    operators: tuple[int, ...]
    inputs: tuple[str, ...]
    "Values from outside in order of first use, parameters and inputs from the step plan among them."
    outputs: tuple[str, ...]
    "Values that something outside uses."


def arrange(graph: Graph, members: Sequence[int]) -> list[int | Region]:
    """The operators of a graph in an order of execution in which `members` (none of them a boundary) stand together
    in regions as large as possible.

    Two members belong together if one feeds the other and no boundary lies between them on any path. Members must
    not depend on pointwise operators that are no members, unless a boundary lies between.
    """
    chosen = set(members)
    level = levels(graph)
    boundary = [KINDS[operator.kind].boundary for operator in graph.operators]
    produced = {name: i for i, operator in enumerate(graph.operators) for name in operator.outputs}
    root = {place: place for place in chosen}

    def find(place: int) -> int:
        while root[place] != place:
            place = root[place]
        return place

    for place in sorted(chosen):
        for name in graph.operators[place].inputs:
            source = produced.get(name, -1)
            if source in chosen and level[source] == level[place]:
                root[find(place)] = find(source)
    groups: dict[int, list[int]] = {}
    for place in sorted(chosen):
        groups.setdefault(find(place), []).append(place)
    items: list[tuple[tuple[int, int, int], int | Region]] = []
    for group in groups.values():
        items.append(((level[group[0]], 0, group[0]), make_region(graph, group)))
    for place in range(len(graph.operators)):
        if place not in chosen:
            items.append(((level[place], 2 if boundary[place] else 1, place), place))
    return [item for _, item in sorted(items, key=lambda item: item[0])]


def levels(graph: Graph) -> list[int]:
    """For every operator, the largest number of boundaries on a path that leads to it."""
    height: dict[str, int] = {}
    result = []
    for operator in graph.operators:
        here = max((height.get(name, 0) for name in operator.inputs if name), default=0)
        result.append(here)
        for name in operator.outputs:
            height[name] = here + KINDS[operator.kind].boundary
    return result


def make_region(graph: Graph, places: Sequence[int]) -> Region:
    inside = set(places)
    made = [name for place in places for name in graph.operators[place].outputs]
    used = [name for place in places for name in graph.operators[place].inputs if name]
    outside = {
        name for i, operator in enumerate(graph.operators) if i not in inside for name in operator.inputs if name
    }
    outside |= set(graph.outputs)
    return Region(
        operators=tuple(places),
        inputs=tuple(dict.fromkeys(name for name in used if name not in made)),
        outputs=tuple(name for name in made if name in outside),
    )


class Recipe:
    """What a region was computed from, to compute it again: once, at the first need, then kept until its backward."""

    __slots__ = ("inputs", "leaves", "needs", "outputs", "run")

    def __init__(self, run: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], sources: dict[int, Any]) -> None:
        """`sources` are inputs that are results of earlier regions: index -> (recipe, index of the result)."""
        self.run = run
        self.needs = [isinstance(value, torch.Tensor) and value.requires_grad for value in inputs]
        self.inputs: Any = [sources[i] if i in sources else held(value) for i, value in enumerate(inputs)]
        self.leaves: list[Any] = []
        self.outputs: tuple[Any, ...] | None = None

    def compute(self) -> tuple[Any, ...]:
        if self.outputs is None:
            with torch.enable_grad():
                for value, needs in zip(self.inputs, self.needs, strict=True):
                    if type(value) is tuple and value and isinstance(value[0], Recipe):
                        value = value[0].output(value[1])
                    if needs and not isinstance(value, torch.nn.Parameter):
                        value = value.detach().requires_grad_()
                    self.leaves.append(value)
                self.outputs = self.run(*self.leaves)
            self.inputs = None
        return self.outputs

    def output(self, index: int) -> torch.Tensor:
        result: torch.Tensor = self.compute()[index].detach()
        return result

    def backward(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients of the inputs; those of parameters go into their buffers on the way. Lets go of everything."""
        pairs = [(y, dy) for y, dy in zip(self.compute(), gradients, strict=True) if dy is not None and y.requires_grad]
        run_backward([y for y, _ in pairs], [dy for _, dy in pairs])
        result = [
            leaf.grad if needs and not isinstance(leaf, torch.nn.Parameter) else None
            for leaf, needs in zip(self.leaves, self.needs, strict=True)
        ]
        self.outputs, self.leaves = None, []
        return result


def held(value: Any) -> Any:
    """A value as a recipe keeps it: without the graph that made it."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.detach()
    return value


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *inputs: Any) -> tuple[Any, ...]:
        ctx.recipe = recipe
        ctx.set_materialize_grads(False)
        return recipe.run(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        recipe, ctx.recipe = ctx.recipe, None
        return None, *recipe.backward(gradients)


def run_region(
    run: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], sources: dict[int, Any]
) -> tuple[Recipe, tuple[Any, ...]]:
    """(recipe, results) of a region that will be run again in the backward."""
    recipe = Recipe(run, inputs, sources)
    results: Any = _Region.apply(recipe, *inputs)
    return recipe, results


def recall(*known: tuple[torch.Tensor, Recipe, int]) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which what autograd would save of these region results (or views of them) is not saved, but
    computed again when it is needed. `known`: (result, its recipe, its index)."""
    places = {value.untyped_storage().data_ptr(): (recipe, index) for value, recipe, index in known}

    def pack(saved: torch.Tensor) -> Any:
        place = places.get(saved.untyped_storage().data_ptr())
        if place is None:
            return saved
        return place, saved.size(), saved.stride(), saved.storage_offset()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        (recipe, index), size, stride, offset = packed
        result: torch.Tensor = recipe.output(index).as_strided(size, stride, offset)
        return result

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
