"""Attention over a context axis: every device has the queries, keys and values of two chunks of each sequence.

q (B, T, H, K), k and v (B, T, G, K) are this device's chunks (`layout.zigzag_runs`); result (B, T, H, K). Forward and
backward gather the keys and values of all devices and put them in the order of the sequence; only the local ones are
kept for the backward. Each chunk of queries attends to the keys up to its end, or to all keys if attention is not
causal. The gradients of all keys and values are summed over the devices and scattered back (Llama 3, 2024, section
3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pipefit.layout import Run, split_by_shares, zigzag_runs
from pipefit.model.graph import Operator
from pipefit.run.autograd.attention_kernels import AttentionCall, attend_backward, attend_forward
from pipefit.run.autograd.attention_runs import AttentionSpec, KeyValueCache, backward_over, forward_over, sink_gradient
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.sharded.parts import ShardContext, gather_parts, scatter_sums


class ContextSpec(NamedTuple):
    """Settings of an attention operator on one device of a context axis."""

    scale: float
    window: int | None
    causal: bool
    axis: ShardContext
    softcap: float | None = None

    def query_pieces(self, tokens: int) -> tuple[tuple[Run, Run], ...]:
        """Return (run of the local queries, their place in the sequence) of the calls: one per chunk, or one for all if
        attention is not causal. `tokens` is the local length."""
        total = tokens * self.axis.size
        if not self.causal:
            return (((0, tokens), (0, total)),)
        first, last = zigzag_runs(total, self.axis.size)[self.axis.position]
        return ((0, tokens // 2), first), ((tokens // 2, tokens), last)

    def sees_from(self, start: int) -> AttentionSpec:
        """Return the settings of queries whose first one is token `start` of the sequence."""
        return AttentionSpec(self.scale, self.window, None, start, self.softcap)


def gather_sequence(x: torch.Tensor, axis: ShardContext) -> torch.Tensor:
    """Return (B, c T, G, K) in the order of the sequence, from the chunks (B, T, G, K) of the c devices."""
    total = x.shape[1] * axis.size
    gathered = gather_parts(x.transpose(0, 1), split_by_shares(total, axis.shares), 0, axis)
    size = x.shape[1] // 2
    firsts = [gathered[2 * part * size : (2 * part + 1) * size] for part in range(axis.size)]
    lasts = [gathered[(2 * part + 1) * size : (2 * part + 2) * size] for part in reversed(range(axis.size))]
    return torch.cat(firsts + lasts).transpose(0, 1)


def scatter_sequence(x: torch.Tensor, axis: ShardContext) -> torch.Tensor:
    """Return this device's chunks (B, T, G, K) of the sum over the devices of x (B, c T, G, K)."""
    total = x.shape[1]
    moved = x.transpose(0, 1)
    parts = torch.cat([moved[start:stop] for runs in zigzag_runs(total, axis.size) for start, stop in runs])
    return scatter_sums(parts, split_by_shares(total, axis.shares), 0, axis).transpose(0, 1)


class _ContextAttention(torch.autograd.Function):
    """Attention of the local queries: saves q, k, v, the result, and the log-sum-exps of every chunk."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, record: SavedForward, spec: ContextSpec) -> Any:
        out, sums = attend_chunks(record, spec, q, k, v, sinks)
        ctx.record, ctx.spec, ctx.sums, ctx.sinks = record, spec, sums, sinks
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        gradients = chunk_gradients(ctx.record, ctx.spec, dy, (q, k, v), (out, ctx.sums))
        sinks = None if ctx.sinks is None else sink_gradient(ctx.sinks, dy, out, torch.cat(ctx.sums, 2))
        ctx.record = ctx.sums = None
        return *gradients, sinks, None, None


def attend_chunks(
    record: SavedForward,
    spec: ContextSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the result of the local queries, and the log-sum-exps of each call."""
    keys, values = gather_sequence(k, spec.axis), gather_sequence(v, spec.axis)
    results, sums = [], []
    for (first, last), (start, stop) in spec.query_pieces(q.shape[1]):
        seen = keys[:, :stop], values[:, :stop]
        if spec.causal:
            result, total = forward_over(_cache_of(*seen), record, q[:, first:last], spec.sees_from(start), sinks)
        else:
            result, total = attend_forward(AttentionCall(spec.scale, causal=False), q, *seen)
        results.append(result)
        sums.append(total)
    return (results[0] if len(results) == 1 else torch.cat(results, 1)), sums


def chunk_gradients(
    record: SavedForward,
    spec: ContextSpec,
    dy: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, list[torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the local q, k and v, from the results of `attend_chunks`."""
    (q, k, v), (out, sums) = inputs, outputs
    keys, values = gather_sequence(k, spec.axis), gather_sequence(v, spec.axis)
    query_gradients: list[torch.Tensor] = []
    total: list[torch.Tensor] = []
    pieces = [*zip(spec.query_pieces(q.shape[1]), sums, strict=True)]
    for ((first, last), (start, stop)), lse in reversed(pieces):
        seen, part = (keys[:, :stop], values[:, :stop]), slice(first, last)
        if spec.causal:
            past, sees = _cache_of(*seen), spec.sees_from(start)
            dq, *more = backward_over(past, record, dy[:, part], q[:, part], out[:, part], lse, sees)
        else:
            dq, *more = attend_backward(AttentionCall(spec.scale, causal=False), dy, q, *seen, out, lse)
        query_gradients.insert(0, dq)
        if not total:  # the last piece sees the most keys
            total = more
        else:
            for gradient, addend in zip(total, more, strict=True):
                gradient[:, :stop].add_(addend)
        del dq, more, seen
    length = keys.shape[1]
    del keys, values
    dk, dv = (scatter_sequence(_pad_tokens(gradient, length), spec.axis) for gradient in total)
    return torch.cat(query_gradients, 1), dk, dv


def _cache_of(keys: torch.Tensor, values: torch.Tensor) -> KeyValueCache:
    past = KeyValueCache()
    past.chunks[0] = (keys, values)
    return past


def _pad_tokens(gradient: torch.Tensor, length: int) -> torch.Tensor:
    """Return the gradient of all keys: zero for those after the last query."""
    missing = length - gradient.shape[1]
    if not missing:
        return gradient
    return torch.cat([gradient, gradient.new_zeros((gradient.shape[0], missing, *gradient.shape[2:]))], 1)


def context_attention(operator: Operator, axis: ShardContext) -> Callable[..., Any]:
    """Return the function (record, q, k, v, sinks...) of an attention operator on a device of a context axis."""
    attributes = operator.attributes
    causal, softcap = bool(attributes.get("causal", True)), attributes.get("softcap")
    spec = ContextSpec(float(attributes["scale"]), attributes.get("window"), causal, axis, softcap)

    def run_attention(
        record: SavedForward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> Any:
        assert causal or (sinks is None and softcap is None), "sinks and capped scores need causal attention"
        if torch.is_grad_enabled():
            return _ContextAttention.apply(q, k, v, sinks, record, spec)
        return attend_chunks(record, spec, q, k, v, sinks)[0]

    return run_attention


BUILDERS: dict[str, Any] = {}
"""The builder of attention (`run/ops/attention.py`) calls `context_attention`."""
