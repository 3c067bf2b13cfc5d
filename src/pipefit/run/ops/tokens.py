"""put_tokens(h, x, places) and take_tokens(h, places): rows of a sequence by their places b T + t.

h (B, T, D), x (1, I, D), places int64 (1, I); results (B, T, D) and (1, L, D). Nothing is kept but the places.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.run.ops import Context, Step


class _PutTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return h.flatten(0, 1).index_copy(0, places.flatten(), x.flatten(0, 1)).view(h.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        flat, rows = dy.reshape(-1, dy.shape[-1]), places.flatten()
        dx = flat.index_select(0, rows).view(*places.shape, dy.shape[-1]) if ctx.needs_input_grad[1] else None
        dh = flat.index_fill(0, rows, 0).view(dy.shape) if ctx.needs_input_grad[0] else None
        return dh, dx, None


class _TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.shape = h.shape
        return h.reshape(-1, h.shape[-1]).index_select(0, places.flatten()).view(*places.shape, h.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        dh = dy.new_zeros(ctx.shape)
        dh.view(-1, dh.shape[-1]).index_add_(0, places.flatten(), dy.reshape(-1, dy.shape[-1]))
        return dh, None


def build_put(operator: Operator, context: Context) -> Step:
    return Step(_PutTokens.apply)


def build_take(operator: Operator, context: Context) -> Step:
    return Step(_TakeTokens.apply)


BUILDERS = {"put_tokens": build_put, "take_tokens": build_take}
