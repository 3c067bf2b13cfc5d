"""embedding(indices, weight): rows of a table. The gradient is added into the table's buffer row by row.

Indices (B, T) int64, weight (V, D), result (B, T, D). No dense (V, D) gradient is made beside the buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.ops import Context, Step


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(indices)
        return functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        buffer = ctx.weight.main_grad
        buffer.index_add_(0, indices.reshape(-1), dy.reshape(-1, dy.shape[-1]).to(buffer.dtype))
        return None, None


def build(operator: Operator, context: Context) -> Step:
    return Step(_Embedding.apply)


BUILDERS = {"embedding": build}
