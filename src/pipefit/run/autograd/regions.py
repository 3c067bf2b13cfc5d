"""Regions: the pointwise operators between two boundaries (linear layers, attention, collectives, loss), or one gather.

Regions have two uses. Selective recomputation saves a region's inputs and runs the region again in the backward, once,
however many linear layers read its results (Korthikanti et al., 2022, extended from attention to all cheap operators).
On GPUs every pointwise region also becomes one compiled function. `model/analysis/regions.py` groups the operators and
`model/analysis/saved.py` selects the saved values, so that the planner's bytes agree with the runtime's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipefit.run.autograd.engine import run_backward


class RecomputeRegion:
    """The inputs of a region, to compute it again: once, at the first need, then kept until its backward."""

    __slots__ = ("inputs", "leaves", "needs", "outputs", "run")

    def __init__(self, run: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], sources: dict[int, Any]) -> None:
        """`sources` are inputs that are results of earlier regions: index -> (region, index of the result)."""
        self.run = run
        self.needs = [isinstance(value, torch.Tensor) and value.requires_grad for value in inputs]
        self.inputs: Any = [sources[i] if i in sources else detach_value(value) for i, value in enumerate(inputs)]
        self.leaves: list[Any] = []
        self.outputs: tuple[Any, ...] | None = None

    def compute_results(self) -> tuple[Any, ...]:
        if self.outputs is None:
            with torch.enable_grad():
                for value, needs in zip(self.inputs, self.needs, strict=True):
                    if type(value) is tuple and value and isinstance(value[0], RecomputeRegion):
                        value = value[0].region_output(value[1])
                    if needs and not isinstance(value, torch.nn.Parameter):
                        value = value.detach().requires_grad_()
                    self.leaves.append(value)
                self.outputs = self.run(*self.leaves)
            self.inputs = None
        return self.outputs

    def region_output(self, index: int) -> torch.Tensor:
        result: torch.Tensor = self.compute_results()[index].detach()
        return result

    def backward_region(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of the inputs; those of parameters go into their buffers. Releases all saved tensors."""
        pairs = [
            (y, dy)
            for y, dy in zip(self.compute_results(), gradients, strict=True)
            if dy is not None and y.requires_grad
        ]
        run_backward([y for y, _ in pairs], [dy for _, dy in pairs])
        result = [
            leaf.grad if needs and not isinstance(leaf, torch.nn.Parameter) else None
            for leaf, needs in zip(self.leaves, self.needs, strict=True)
        ]
        self.outputs, self.leaves = None, []
        return result


def detach_value(value: Any) -> Any:
    """Return a value without its autograd graph, to be saved by a region."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.detach()
    return value


class _RegionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recipe: RecomputeRegion, *inputs: Any) -> tuple[Any, ...]:
        ctx.recipe = recipe
        ctx.set_materialize_grads(False)
        return recipe.run(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        recipe, ctx.recipe = ctx.recipe, None
        return None, *recipe.backward_region(gradients)


def run_region(
    run: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], sources: dict[int, Any]
) -> tuple[RecomputeRegion, tuple[Any, ...]]:
    """Return (recompute region, results) of a region that will run again in the backward."""
    recipe = RecomputeRegion(run, inputs, sources)
    results: Any = _RegionFunction.apply(recipe, *inputs)
    return recipe, results


def recall_outputs(*known: tuple[torch.Tensor, RecomputeRegion, int]) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which autograd does not save these region results (or views of them), but recomputes them on
    use. `known`: (result, its region, its index)."""
    storages = [(value.untyped_storage(), recipe, index) for value, recipe, index in known]
    places = {storage.data_ptr(): (recipe, index) for storage, recipe, index in storages if storage.nbytes()}
    "Empty tensors, on a device without rows, are left out: all of them share one address."

    def pack_tensor(saved: torch.Tensor) -> Any:
        source = places.get(saved.untyped_storage().data_ptr())
        if source is None:
            return saved
        return source, saved.size(), saved.stride(), saved.storage_offset()

    def unpack_tensor(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        (recipe, index), size, stride, offset = packed
        result: torch.Tensor = recipe.region_output(index).as_strided(size, stride, offset)
        return result

    return torch.autograd.graph.saved_tensors_hooks(pack_tensor, unpack_tensor)
