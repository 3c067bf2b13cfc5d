"""attention(q, k, v) {causal, scale, window}: scaled dot products over grouped heads, also over earlier slices.

q (B, T, H, K), k and v (B, T, G, K), H a multiple of G; result (B, T, H, K). A sequence may come in slices: a slice
attends to its own keys and values and to those of the slices before it, which `Past` holds as detached tensors.
Slices run backward in reverse order; a slice's backward adds what it owes to the keys and values of earlier slices
into `Past`, and picks up what later slices left for its own (reference: TeraPipe; the autograd recipe for slices).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.ops import Context, Step
from pipefit.run.stage_record import Record


class Past:
    """The keys and values of one attention operator for one microbatch, slice by slice, and their gradients.

    `put` stores (or, when a slice is recomputed, stores again) the keys and values of a slice; `owe` accumulates
    gradients for an earlier slice; `settle` hands over what is owed to a slice and forgets the slice: no earlier
    slice can still need it.
    """

    def __init__(self) -> None:
        self.chunks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.owed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def put(self, slice_: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.chunks[slice_] = (k.detach(), v.detach())

    def before(self, slice_: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The chunks of all earlier slices, in order."""
        assert all(i in self.chunks for i in range(slice_)), "slices must be run forward in order"
        return [self.chunks[i] for i in range(slice_)]

    def owe(self, slice_: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        if slice_ in self.owed:
            total_k, total_v = self.owed[slice_]
            total_k.add_(dk)
            total_v.add_(dv)
        else:
            wide = torch.promote_types(dk.dtype, torch.float32)
            self.owed[slice_] = (dk.to(wide, copy=True), dv.to(wide, copy=True))

    def settle(self, slice_: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        self.chunks.pop(slice_, None)
        return self.owed.pop(slice_, None)


class _SlicedAttention(torch.autograd.Function):
    """Attention of one slice, with its own small autograd graph over the slice and the chunks before it."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, past: Past, record: Record, attend: Any) -> torch.Tensor:
        ctx.past, ctx.slice = past, record.slice
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            chunks = [[x.detach().requires_grad_() for x in chunk] for chunk in past.before(record.slice)]
            out = attend(leaves[0], *joined(chunks, leaves[1], leaves[2]), record.cache)
        ctx.leaves = (*leaves, *(x for chunk in chunks for x in chunk))
        ctx.out = out
        return out.detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        gradients = torch.autograd.grad(ctx.out, ctx.leaves, dy)
        ctx.out = ctx.leaves = None
        dq, dk, dv, *earlier = gradients
        for index in range(0, len(earlier), 2):
            ctx.past.owe(index // 2, earlier[index], earlier[index + 1])
        owed = ctx.past.settle(ctx.slice)
        if owed is not None:
            dk, dv = (dk + owed[0]).to(dk.dtype), (dv + owed[1]).to(dv.dtype)
        return dq, dk, dv, None, None, None


def joined(chunks: Sequence[Sequence[Any]], k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of earlier chunks and of this slice, one after the other along the tokens."""
    if not chunks:
        return k, v
    return torch.cat([*(chunk[0] for chunk in chunks), k], 1), torch.cat([*(chunk[1] for chunk in chunks), v], 1)


def build(operator: Operator, context: Context) -> Step:
    scale = operator.attributes.get("scale")
    window = operator.attributes.get("window")
    causal = bool(operator.attributes.get("causal", True))
    sdpa = functional.scaled_dot_product_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: dict[Any, Any] | None = None) -> torch.Tensor:
        """q (B, T, H, K) are the last T of the S positions of k and v (B, S, G, K); masks are made once per cache."""
        count, length = q.shape[1], k.shape[1]
        grouped = q.shape[2] != k.shape[2]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if causal and (count != length or (window is not None and window < length)):
            assert cache is not None
            key = ("band", count, length, window)
            if key not in cache:
                cache[key] = band_mask(count, length, window, q.device)
            out = sdpa(q, k, v, attn_mask=cache[key], scale=scale, enable_gqa=grouped)
        else:
            out = sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)

    if context.slices == 1:
        if window is None:
            return Step(attend)
        return Step(lambda record, q, k, v: attend(q, k, v, record.cache), wants_record=True)
    place = (context.layer, context.operator)
    apply = _SlicedAttention.apply

    def sliced(record: Record, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if not record.train:
            return attend(q, k, v, record.cache)
        past = record.past.get(place)
        if past is None:
            past = record.past[place] = Past()
        past.put(record.slice, k, v)
        if not torch.is_grad_enabled():
            return attend(q, *joined(past.before(record.slice), k, v), record.cache)
        return apply(q, k, v, past, record, attend)

    return Step(sliced, wants_record=True)


def band_mask(count: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool (count, length): query i, at position length - count + i, sees keys up to itself, `window` of them."""
    query = torch.arange(length - count, length, device=device).unsqueeze(1)
    key = torch.arange(length, device=device).unsqueeze(0)
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    return mask


BUILDERS = {"attention": build}
