"""attention(q, k, v) {causal, scale, window}: scaled dot products over grouped heads, also over earlier slices.

q (B, T, H, K), k and v (B, T, G, K), H a multiple of G; result (B, T, H, K). A sequence may come in slices: a slice
attends to its own keys and values and to those of the slices before it, chunk by chunk as they are: results are
merged by their log-sum-exps, and the backward goes over the same chunks with the merged result and log-sum-exp (Ring
Attention, Liu et al., 2023). Nothing is joined, and what earlier slices have kept for their own backward is all that
later ones read. Slices run backward in reverse order; a slice's backward adds what it owes to the keys and values of
earlier slices into `Past`, in float32 or wider, and picks up what later slices left for its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.attention_kernels import Call, attend, attend_back, wide_of
from pipefit.run.ops import Context, Step
from pipefit.run.sight import Sight
from pipefit.run.stage_record import Record


class Sees(NamedTuple):
    """How an operator attends: the factor of the scores, so many last keys (None: all), the stage's shards."""

    scale: float
    window: int | None
    shard: Any


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
        assert slice_ == 0 or slice_ - 1 in self.chunks, "slices must be run forward in order"
        if not torch.is_grad_enabled():
            k, v = compact(k), compact(v)
        self.chunks[slice_] = (k.detach(), v.detach())

    def first(self, slice_: int) -> int:
        """The place in the row of the slice's first token."""
        return sum(self.chunks[index][0].shape[1] for index in range(slice_))

    def owe(self, slice_: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add gradients (which the caller gives away) to what later slices owe to this one."""
        if slice_ in self.owed:
            total_k, total_v = self.owed[slice_]
            total_k.add_(dk)
            total_v.add_(dv)
        else:
            self.owed[slice_] = (dk.to(wide_of(dk.dtype)), dv.to(wide_of(dv.dtype)))

    def settle(self, slice_: int, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole gradients of a slice's keys and values: its own (given away) and what later slices owe to it."""
        del self.chunks[slice_]
        owed = self.owed.pop(slice_, None)
        if owed is None:
            return dk, dv
        return owed[0].add_(dk).to(dk.dtype), owed[1].add_(dv).to(dv.dtype)


def compact(x: torch.Tensor) -> torch.Tensor:
    """x without the rest of its storage: where a layer will be recomputed, nobody else keeps it."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


class _Attention(torch.autograd.Function):
    """Attention of one slice (or of an uncut sequence with a mask): keeps q, its result, and the log-sum-exp.

    Keys and values of slices are kept by `past`, as later ones read them; those of an uncut sequence by autograd, so
    that recomputation can do without them.
    """

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, past: Past, record: Record, sees: Sees) -> Any:
        ctx.past, ctx.record, ctx.sees = past, record, sees
        out, lse = forward_over(past, record, q, sees)
        ctx.save_for_backward(q, out, *((k, v) if record.past is None else ()))
        ctx.lse = lse
        if record.past is None:
            past.chunks.clear()
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        q, out, *whole = ctx.saved_tensors
        if whole:
            ctx.past.chunks[0] = (whole[0], whole[1])
        gradients = backward_over(ctx.past, ctx.record, dy, q, out, ctx.lse, ctx.sees)
        ctx.past = ctx.record = ctx.lse = None
        return *gradients, None, None, None


def forward_over(past: Past, record: Record, q: torch.Tensor, sees: Sees) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, log-sum-exp) of the slice's queries over its own chunk and those before it that they see."""
    sight = Sight(record, past.first(record.slice), q, sees.window, sees.shard)
    mask = sight.of_own()
    out, lse = attend(Call(sees.scale, causal=mask is None), q, *past.chunks[record.slice], mask)
    stop = sight.first
    for index in range(record.slice - 1, -1, -1):
        k, v = past.chunks[index]
        start = stop - k.shape[1]
        mask = sight.of_earlier(start, stop)
        stop = start
        if mask == "nothing":
            break
        more, more_lse = attend(Call(sees.scale, causal=False), q, k, v, mask)
        if out.dtype != lse.dtype:
            out = out.to(lse.dtype)
        out.lerp_(more.to(lse.dtype), (more_lse - lse).sigmoid_().transpose(1, 2).unsqueeze(-1))
        lse = torch.logaddexp(lse, more_lse)
        del more
    return out.to(q.dtype), lse


def backward_over(
    past: Past,
    record: Record,
    dy: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sees: Sees,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the slice's q, k and v, what later slices owe it among them; earlier ones are owed theirs."""
    sight = Sight(record, past.first(record.slice), q, sees.window, sees.shard)
    mask = sight.of_own()
    k, v = past.chunks[record.slice]
    dq, dk, dv = attend_back(Call(sees.scale, causal=mask is None), dy, q, k, v, out, lse, mask)
    dk, dv = past.settle(record.slice, dk, dv)
    stop = sight.first
    for index in range(record.slice - 1, -1, -1):
        k, v = past.chunks[index]
        start = stop - k.shape[1]
        mask = sight.of_earlier(start, stop)
        stop = start
        if mask == "nothing":
            break
        more, dk_owed, dv_owed = attend_back(Call(sees.scale, causal=False), dy, q, k, v, out, lse, mask)
        if dq.dtype != lse.dtype:
            dq = dq.to(lse.dtype)
        dq.add_(more)
        del more
        past.owe(index, dk_owed, dv_owed)
    return dq.to(q.dtype), dk, dv


def build(operator: Operator, context: Context) -> Step:
    scale, window = float(operator.attributes["scale"]), operator.attributes.get("window")
    sees = Sees(scale, window, context.shard)
    causal = bool(operator.attributes.get("causal", True))
    place = (context.layer, context.operator)

    def attention(record: Record, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        past = Past()
        if record.past is not None:
            past = record.past.setdefault(place, past)
        elif record.feed.document_bounds[1] == 0 and (window is None or window >= q.shape[1]):
            return whole(q, k, v, causal, scale)
        assert causal, "only causal attention can be cut or masked"
        past.put(record.slice, k, v)
        if torch.is_grad_enabled():
            return _Attention.apply(q, k, v, past, record, sees)
        return forward_over(past, record, q, sees)[0]

    return Step(attention, wants_record=True)


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """PyTorch's own attention, for uncut sequences without a mask."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


BUILDERS = {"attention": build}
