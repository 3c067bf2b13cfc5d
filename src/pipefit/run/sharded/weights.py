"""Weights stored sharded over the shard axis and gathered for use (FSDP; ZeRO-3: Rajbhandari et al., 2020).

An operator that multiplies by such a weight gets a handle. It gathers the weight for its forward, releases it, and
gathers it again for the input gradient. The full weight gradient exists only until it is reduced; this device's part is
added to the buffer. Between operators a device therefore holds only its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipefit.layout import Run
from pipefit.run.sharded.collectives import How
from pipefit.run.sharded.parts import ShardContext, gather_parts, scatter_sums


class ShardedWeight:
    """Handle of a parameter stored as a run along `dim`. `how`: the lowerings of its gathers and of the reduction of
    its gradient."""

    __slots__ = ("dim", "how", "parameter", "runs", "shard")

    def __init__(self, parameter: Any, runs: Sequence[Run], dim: int, shard: ShardContext, how: How) -> None:
        self.parameter, self.runs, self.dim, self.shard, self.how = parameter, runs, dim, shard, how

    @property
    def requires_grad(self) -> bool:
        return bool(self.parameter.requires_grad)

    def gather_whole(self) -> torch.Tensor:
        """Return the full weight, gathered now. Every device of the axis calls this together."""
        return gather_parts(self.parameter.detach(), self.runs, self.dim, self.shard, self.how[0])

    def add_gradient(self, add: Callable[[torch.Tensor], Any]) -> None:
        """Call `add` on a full-size buffer of zeros of the bound buffer's dtype, to add this device's partial gradient.
        Then sum over the axis into the bound buffer. Every device calls this together."""
        buffer = self.parameter.main_grad
        shape = list(self.parameter.shape)
        shape[self.dim] = self.runs[-1][1]
        partial = buffer.new_zeros(shape)
        add(partial)
        buffer.add_(scatter_sums(partial, self.runs, self.dim, self.shard, self.how[1]))


def whole_weight(weight: Any) -> Any:
    """Return the tensor to compute with: a weight stored sharded is gathered."""
    return weight.gather_whole() if isinstance(weight, ShardedWeight) else weight


def leaf_parameter(weight: Any) -> Any:
    """Return the parameter itself, so that autograd sees that it needs a gradient."""
    return weight.parameter if isinstance(weight, ShardedWeight) else weight


def add_gradient(weight: Any, add: Callable[[torch.Tensor], Any]) -> None:
    """Let `add(buffer)` add a weight's gradient to its buffer, or to a full-size one if the weight is stored
    sharded."""
    if isinstance(weight, ShardedWeight):
        weight.add_gradient(add)
    else:
        add(weight.main_grad)
