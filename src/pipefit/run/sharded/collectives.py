"""Collectives over the shard axis of a stage as autograd functions.

Backward passes follow the tensors' forms (HAP's duality). The gradient of a tensor in form I is P, of G it is G, of P
it is I. So all_gather and reduce_scatter are each other's backward, all_reduce and all_to_all are their own, and a
slice of a replicated tensor puts its gradient into zeros. `how` selects the lowering of the parts in the forward and in
the backward pass (`run/sharded/parts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipefit.layout import Run
from pipefit.run.sharded.parts import ShardContext, exchange_parts, gather_parts, scatter_sums, sum_all

How = tuple[str, str]
"""The lowerings (padded, grouped, alltoallv) of the forward and of the backward pass."""

PADDED: How = ("padded", "padded")


class AllGather(torch.autograd.Function):
    """G(dim) to I; backward reduce-scatter."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, runs: Sequence[Run], dim: int, context: ShardContext, how: How = PADDED
    ) -> torch.Tensor:
        ctx.runs, ctx.dim, ctx.context, ctx.how = runs, dim, context, how
        return gather_parts(x, runs, dim, context, how[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return scatter_sums(dy, ctx.runs, ctx.dim, ctx.context, ctx.how[1]), None, None, None, None


class ReduceScatter(torch.autograd.Function):
    """P to G(dim); backward all-gather."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, runs: Sequence[Run], dim: int, context: ShardContext, how: How = PADDED
    ) -> torch.Tensor:
        ctx.runs, ctx.dim, ctx.context, ctx.how = runs, dim, context, how
        return scatter_sums(x, runs, dim, context, how[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return gather_parts(dy, ctx.runs, ctx.dim, ctx.context, ctx.how[1]), None, None, None, None


class AllToAll(torch.autograd.Function):
    """G of one dimension to G of another; backward in reverse. `cut` and `new`: (runs of all devices, dimension)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cut: tuple[Sequence[Run], int],
        new: tuple[Sequence[Run], int],
        context: ShardContext,
        how: How = PADDED,
    ) -> torch.Tensor:
        ctx.cut, ctx.new, ctx.context, ctx.how = cut, new, context, how
        return exchange_parts(x, cut, new, context, how[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return exchange_parts(dy, ctx.new, ctx.cut, ctx.context, ctx.how[1]), None, None, None, None


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
    """I to G(dim); backward puts the gradient into zeros, a partial gradient of the full tensor."""

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
