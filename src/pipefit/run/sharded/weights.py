"""Weights that are stored split over the shard axis and gathered for use (FSDP; ZeRO-3: Rajbhandari et al., 2020).

An operator that multiplies by such a weight gets a handle. It gathers the weight for its forward, lets go of it, and
gathers it again for the input gradient; its weight gradient exists whole for a moment, is reduced, and only this
device's part is added to the buffer. So between operators a device holds no more than its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipefit.layout import Run
from pipefit.run.sharded.collectives import How
from pipefit.run.sharded.parts import ShardContext, gather_parts, scatter_sums


class ShardedWeight:
    """A parameter of which this device stores a run along `dim`, as an operator uses it. `how`: the lowerings of its
    gathers and of the reduction of its gradient."""

    __slots__ = ("dim", "how", "parameter", "runs", "shard")

    def __init__(self, parameter: Any, runs: Sequence[Run], dim: int, shard: ShardContext, how: How) -> None:
        self.parameter, self.runs, self.dim, self.shard, self.how = parameter, runs, dim, shard, how

    @property
    def requires_grad(self) -> bool:
        return bool(self.parameter.requires_grad)

    def gather_whole(self) -> torch.Tensor:
        """All of it, gathered now. Every device of the axis calls this together."""
        return gather_parts(self.parameter.detach(), self.runs, self.dim, self.shard, self.how[0])

    def add_gradient(self, add: Callable[[torch.Tensor], Any]) -> None:
        """Let `add` add this device's gradient (a partial sum) to a whole buffer of zeros, as wide as the bound one;
        then sum over the axis, into the bound buffer. Every device calls this together."""
        buffer = self.parameter.main_grad
        shape = list(self.parameter.shape)
        shape[self.dim] = self.runs[-1][1]
        partial = buffer.new_zeros(shape)
        add(partial)
        buffer.add_(scatter_sums(partial, self.runs, self.dim, self.shard, self.how[1]))


def whole_weight(weight: Any) -> Any:
    """The tensor to compute with: a weight that is stored split is gathered."""
    return weight.gather_whole() if isinstance(weight, ShardedWeight) else weight


def leaf_parameter(weight: Any) -> Any:
    """The parameter itself, for autograd to see that a gradient is wanted."""
    return weight.parameter if isinstance(weight, ShardedWeight) else weight


def add_gradient(weight: Any, add: Callable[[torch.Tensor], Any]) -> None:
    """`add(buffer)` adds a weight's gradient to its buffer, or to a whole one where the weight is stored split."""
    if isinstance(weight, ShardedWeight):
        weight.add_gradient(add)
    else:
        add(weight.main_grad)
