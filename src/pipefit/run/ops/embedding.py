"""embedding(indices, weight) {first, padding}: rows of a table. The gradient is added into the buffer row by row.

Indices (B, T) int64, weight (V, D), result (B, T, D). No separate dense (V, D) gradient is made; as for a linear layer,
the gradient can be deferred to W. A shard program that splits the table writes `first`: this device holds the rows from
there on, and returns zeros for other indices. The row `padding`, if set, gets no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import DeferredGradient, SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.sharded.weights import add_gradient, leaf_parameter, whole_weight

WIDE_BYTES = 4
"""Bytes of the narrowest type in which rows are summed."""

SUM_ELEMENTS = 1 << 22
"""Elements of the table that are summed at once for a narrower buffer: 16 MiB."""


class _EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, leaf: Any, weight: Any, record: SavedForward, layer: int
    ) -> torch.Tensor:
        ctx.weight, ctx.record, ctx.layer = weight, record, layer
        ctx.save_for_backward(indices)
        return functional.embedding(indices, whole_weight(weight))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        if ctx.record.deferred is None:
            accumulate_rows(ctx.weight, indices, dy)
        else:
            ctx.record.deferred.append(DeferredGradient(ctx.layer, accumulate_rows, (ctx.weight, indices, dy)))
        return None, None, None, None, None


def accumulate_rows(weight: Any, indices: torch.Tensor, dy: torch.Tensor) -> None:
    """Add each row of dy (B, T, D) to the buffer row with its index."""

    def add_rows(buffer: torch.Tensor) -> None:
        flat, rows = indices.reshape(-1), dy.reshape(-1, dy.shape[-1])
        if buffer.dtype.itemsize >= WIDE_BYTES:
            buffer.index_add_(0, flat, rows.to(buffer.dtype))
            return
        # A narrow buffer would round every token's row: the rows are summed in float32, some columns at a time.
        step = max(1, SUM_ELEMENTS // len(buffer))
        for start in range(0, rows.shape[1], step):
            columns = slice(start, start + step)
            total = torch.zeros_like(buffer[:, columns], dtype=torch.float32)
            buffer[:, columns] += total.index_add_(0, flat, rows[:, columns].float())

    add_gradient(weight, add_rows)


def build_embedding(operator: Operator, context: OperatorContext) -> OperatorStep:
    layer, apply = context.layer, _EmbeddingFunction.apply
    first, padding = operator.attributes.get("first"), operator.attributes.get("padding")

    def ignore_gradient(found: Any, indices: torch.Tensor) -> Any:
        return found if padding is None else torch.where((indices != padding).unsqueeze(-1), found, found.detach())

    def run_embedding(record: SavedForward, indices: torch.Tensor, weight: Any) -> Any:
        return ignore_gradient(apply(indices, leaf_parameter(weight), weight, record, layer), indices)

    def run_shard(record: SavedForward, indices: torch.Tensor, weight: Any) -> Any:
        local = (indices >= first) & (indices < first + weight.shape[0])
        rows = apply(torch.where(local, indices - first, 0), weight, weight, record, layer)
        # The product also zeroes the gradients of rows on other devices.
        return ignore_gradient(rows * local.unsqueeze(-1), indices)

    return OperatorStep(run_embedding if first is None else run_shard, wants_record=True)


BUILDERS = {"embedding": build_embedding}
