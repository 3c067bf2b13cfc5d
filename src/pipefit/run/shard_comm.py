"""The shard axis of a stage at run time: who holds which part, and the collectives over it as autograd functions.

Backward passes follow the forms of the tensors (HAP's duality): the gradient of a tensor in form I is partial, of G
it is G, of P it is replicated. So all_gather and reduce_scatter are each other's backward, all_reduce is its own,
and a slice of a replicated tensor puts its gradient into zeros. Even shares use the even collectives; uneven shares
are padded to the longest part and trimmed, because gloo rejects (and NCCL emulates) unequal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipefit.lab.pace import exchanged
from pipefit.layout import Run, split
from pipefit.run import comms


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContext:
    """This device's place on the shard axis of its group."""

    group: Any
    "The process group of the axis: its members in order of position."
    shares: tuple[int, ...]
    position: int

    @property
    def size(self) -> int:
        return len(self.shares)

    def runs(self, length: int, units: int = 0) -> tuple[Run, ...]:
        """How a dimension of this length is cut over the axis, in so many units (0: as many as it is long)."""
        return split(length, self.shares, length // units if units else 1)

    def length(self, total: int) -> int:
        """The part of a dimension of length `total` that this device holds."""
        start, stop = self.runs(total)[self.position]
        return stop - start


def gather_parts(x: torch.Tensor, runs: Sequence[Run], dim: int, context: ShardContext) -> torch.Tensor:
    """The whole tensor from everyone's run along `dim`; x is this device's run."""
    lengths = [stop - start for start, stop in runs]
    longest = max(lengths)
    moved = x.movedim(dim, 0)
    if lengths[context.position] < longest:
        padded = moved.new_zeros((longest, *moved.shape[1:]))
        padded[: lengths[context.position]] = moved
        moved = padded
    out = moved.new_empty((longest * context.size, *moved.shape[1:]))
    exchanged(comms.all_gather(out, moved.contiguous(), context.group).wait)
    if min(lengths) < longest:
        out = torch.cat([out[i * longest : i * longest + length] for i, length in enumerate(lengths)])
    return out.movedim(0, dim).contiguous()


def scatter_sums(x: torch.Tensor, runs: Sequence[Run], dim: int, context: ShardContext) -> torch.Tensor:
    """This device's run along `dim` of the sum of everyone's x."""
    lengths = [stop - start for start, stop in runs]
    longest = max(lengths)
    moved = x.movedim(dim, 0).contiguous()
    if min(lengths) < longest:
        padded = moved.new_zeros((longest * context.size, *moved.shape[1:]))
        for i, (start, stop) in enumerate(runs):
            padded[i * longest : i * longest + stop - start] = moved[start:stop]
        moved = padded
    out = moved.new_empty((longest, *moved.shape[1:]))
    exchanged(comms.reduce_scatter(out, moved, context.group).wait)
    return out[: lengths[context.position]].movedim(0, dim).contiguous()


def sum_all(x: torch.Tensor, context: ShardContext) -> torch.Tensor:
    """The sum of everyone's x, as a new tensor."""
    total = x.contiguous().clone()
    exchanged(lambda: dist.all_reduce(total, group=context.group))
    return total


class AllGather(torch.autograd.Function):
    """G(dim) to I; backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, runs: Sequence[Run], dim: int, context: ShardContext) -> torch.Tensor:
        ctx.runs, ctx.dim, ctx.context = runs, dim, context
        return gather_parts(x, runs, dim, context)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return scatter_sums(dy, ctx.runs, ctx.dim, ctx.context), None, None, None


class ReduceScatter(torch.autograd.Function):
    """P to G(dim); backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, runs: Sequence[Run], dim: int, context: ShardContext) -> torch.Tensor:
        ctx.runs, ctx.dim, ctx.context = runs, dim, context
        return scatter_sums(x, runs, dim, context)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return gather_parts(dy, ctx.runs, ctx.dim, ctx.context), None, None, None


class AllReduce(torch.autograd.Function):
    """P to I; backward all-reduce (a tensor in form I has a partial gradient)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: ShardContext) -> torch.Tensor:
        ctx.context = context
        return sum_all(x, context)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return sum_all(dy, ctx.context), None


class ShardSlice(torch.autograd.Function):
    """I to G(dim); backward puts the gradient into zeros, a partial gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Run, dim: int) -> torch.Tensor:
        start, stop = run
        ctx.shape, ctx.start, ctx.dim = x.shape, start, dim
        return x.narrow(dim, start, stop - start).contiguous()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dx = dy.new_zeros(ctx.shape)
        dx.narrow(ctx.dim, ctx.start, dy.shape[ctx.dim]).copy_(dy)
        return dx, None, None
