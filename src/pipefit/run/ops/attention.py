"""attention(q, k, v, sinks...) {causal, scale, window, softcap, ahead, cut}: scaled dot products over grouped heads,
also over earlier slices.

q (B, T, H, K), k and v (B, T, G, K), H a multiple of G; result (B, T, H, K). A sequence may come in slices. A slice
attends to its own keys and values and to those of earlier slices, one chunk at a time, without concatenation. Results
are merged by their log-sum-exps; the backward goes over the same chunks with the merged result and log-sum-exp (Ring
Attention, Liu et al., 2023). Later slices read only tensors that earlier slices have saved for their own backward.
Slices run backward in reverse order: each slice adds its gradients for earlier keys and values into `KeyValueCache`, in
float32 or wider, and takes out those that later slices added for its own.

If a shard program splits queries along tokens (`cut`), a device has the queries of a part of the slice and the keys of
the whole slice. Keys before its part are one more earlier run; keys after it are not visible.

Sinks (H,) are the scores of one more key a head, with the value zero. They change a result and its log-sum-exp as one
more run does, and the kernels need not know of them.

With `ahead`, the fourth input is int64 (B, T): the last key that each query sees. It becomes a part of the mask. No
query sees keys of later slices, so the planner does not cut such sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.autograd.attention_runs import AttentionSpec, KeyValueCache, backward_over, forward_over, sink_gradient
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.attention_context import context_attention


class _AttentionFunction(torch.autograd.Function):
    """Attention of one slice (or of an uncut sequence with a mask): saves q, the result, and the log-sum-exp.

    `past` keeps the keys and values of slices, since later slices read them. Autograd keeps those of an uncut sequence,
    so that recomputation can drop them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, sinks: Any, held: tuple[KeyValueCache, SavedForward], sees: AttentionSpec
    ) -> Any:
        past, record = held
        ctx.past, ctx.record, ctx.sees, ctx.sinks = past, record, sees, sinks
        out, lse = forward_over(past, record, q, sees, sinks)
        ctx.save_for_backward(q, out, *((k, v) if record.past is None else ()))
        ctx.lse = lse
        if record.past is None:
            past.chunks.clear()
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        q, out, *key_value = ctx.saved_tensors
        if key_value:
            ctx.past.chunks[0] = (key_value[0], key_value[1])
        gradients = backward_over(ctx.past, ctx.record, dy, q, out, ctx.lse, ctx.sees)
        sinks = sink_gradient(ctx.sinks, dy, out, ctx.lse)
        ctx.past = ctx.record = ctx.lse = None
        return *gradients, sinks, None, None


def build_attention(operator: Operator, context: OperatorContext) -> OperatorStep:
    if context.sequence is not None:
        return OperatorStep(context_attention(operator, context.sequence), wants_record=True)
    scale, window = float(operator.attributes["scale"]), operator.attributes.get("window")
    dim, first, _ = operator.attributes.get("cut", (0, 0, 0))
    split = dim == 1
    softcap = operator.attributes.get("softcap")
    sees = AttentionSpec(scale, window, context.shard, None if first < 0 else first, softcap)
    causal = bool(operator.attributes.get("causal", True))
    ahead = bool(operator.attributes.get("ahead"))
    needs_own_kernel = softcap is not None or (split and causal) or ahead
    cache_key = (context.layer, context.operator)

    def run_attention(
        record: SavedForward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fourth: torch.Tensor | None = None
    ) -> Any:
        sinks, ends = (None, fourth) if ahead else (fourth, None)
        past, seen = KeyValueCache(), sees._replace(ends=ends)
        if not q.shape[1] and record.past is None:  # keys still have zero gradients: other devices wait for them
            rest = k.sum() + v.sum() if sinks is None else k.sum() + v.sum() + sinks.sum()
            return q[..., : v.shape[3]] + 0.0 * rest
        if record.past is not None:
            past = record.past.setdefault(cache_key, past)
        elif (
            not needs_own_kernel
            and sinks is None
            and q.shape[3] == v.shape[3]
            and record.feed.document_bounds[1] == 0
            and (window is None or window >= q.shape[1])
        ):
            return attend_whole(q, k, v, causal, scale)
        assert causal, "only causal attention can be cut, masked or capped, or have sinks or short values"
        past.put_keys(record.slice, k, v)
        if torch.is_grad_enabled():
            return _AttentionFunction.apply(q, k, v, sinks, (past, record), seen)
        return forward_over(past, record, q, seen, sinks)[0]

    return OperatorStep(run_attention, wants_record=True)


def attend_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """Return PyTorch's own attention, for uncut sequences without a mask."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


BUILDERS = {"attention": build_attention}
