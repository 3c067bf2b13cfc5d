"""Attention of a slice's queries to runs of keys: of its own slice, and of earlier slices, kept by a cache.

Results over several runs are merged by their log-sum-exps; the backward goes over the same runs with the merged result
and log-sum-exp (Ring Attention, Liu et al., 2023). Keys after the queries are not visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from pipefit.run.autograd.attention_kernels import AttentionCall, attend_backward, attend_forward, statistics_dtype
from pipefit.run.autograd.attention_mask import AttentionMask
from pipefit.run.autograd.saved_forward import SavedForward


class AttentionSpec(NamedTuple):
    """Settings of an attention operator: score scale, window (number of last keys; None: all), shards of the stage,
    index of the first query among the slice's tokens (None: the start of the shard's part), and cap of the scores.
    `ends` is the last key (B, T) that each query sees (None: its own)."""

    scale: float
    window: int | None
    shard: Any
    first: int | None = 0
    softcap: float | None = None
    ends: torch.Tensor | None = None

    def call_kernel(self, causal: bool) -> AttentionCall:
        """Return the settings of a kernel call."""
        return AttentionCall(self.scale, causal, self.softcap)

    def query_range(self, queries: int, tokens: int) -> tuple[int, int]:
        """Return the tokens [first, stop) of the slice whose queries are on this device."""
        first = self.shard.runs(tokens)[self.shard.position][0] if self.first is None else self.first
        return first, first + queries


class KeyRun(NamedTuple):
    """A run of keys that one kernel call attends to: `start` to `stop` of a slice, with their mask."""

    slice_: int
    start: int
    stop: int
    causal: bool
    mask: torch.Tensor | None


class KeyValueCache:
    """The keys and values of one attention operator for one microbatch, slice by slice, and their gradients.

    `put_keys` stores the keys and values of a slice, again when the slice is recomputed. `add_gradients` accumulates
    gradients for an earlier slice. `take_gradients` returns the gradients accumulated for a slice and drops the slice:
    no earlier slice can still need it.
    """

    def __init__(self) -> None:
        self.chunks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.owed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def put_keys(self, slice_: int, k: torch.Tensor, v: torch.Tensor) -> None:
        assert slice_ == 0 or slice_ - 1 in self.chunks, "slices must be run forward in order"
        if not torch.is_grad_enabled():
            k, v = copy_compact(k), copy_compact(v)
        self.chunks[slice_] = (k.detach(), v.detach())

    def first_token(self, slice_: int) -> int:
        """Return the position in the row of the slice's first token."""
        return sum(self.chunks[index][0].shape[1] for index in range(slice_))

    def add_gradients(self, slice_: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add gradients from a later slice to this slice's sum. The caller must not use them afterwards."""
        if slice_ in self.owed:
            total_k, total_v = self.owed[slice_]
            total_k.add_(dk)
            total_v.add_(dv)
        else:
            self.owed[slice_] = (dk.to(statistics_dtype(dk.dtype)), dv.to(statistics_dtype(dv.dtype)))

    def take_gradients(self, slice_: int, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the full gradients of a slice's keys and values: its own (overwritten) plus those of later slices."""
        del self.chunks[slice_]
        owed = self.owed.pop(slice_, None)
        if owed is None:
            return dk, dv
        return owed[0].add_(dk).to(dk.dtype), owed[1].add_(dv).to(dv.dtype)


def copy_compact(x: torch.Tensor) -> torch.Tensor:
    """Return x without the rest of its storage: if a layer will be recomputed, nothing else keeps that storage
    alive."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def key_runs(past: KeyValueCache, record: SavedForward, q: torch.Tensor, sees: AttentionSpec) -> Iterator[KeyRun]:
    """Yield the runs of visible keys: of the queries' own tokens, before them in their slice, and in earlier slices."""
    slice_start = past.first_token(record.slice)
    first, end = sees.query_range(q.shape[1], past.chunks[record.slice][0].shape[1])
    sight = AttentionMask(record, slice_start + first, q, sees, (first, end))
    mask = sight.own_mask()
    yield KeyRun(record.slice, first, end, mask is None, mask)
    stop = sight.first
    lengths = [first, *(past.chunks[index][0].shape[1] for index in range(record.slice - 1, -1, -1))]
    for back, length in enumerate(lengths):
        mask_ = sight.earlier_mask(stop - length, stop) if length else None
        stop -= length
        if mask_ == "nothing":
            return
        if length:
            yield KeyRun(record.slice - back, 0, length, False, mask_)


def run_keys(past: KeyValueCache, run: KeyRun) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a run."""
    k, v = past.chunks[run.slice_]
    if run.stop - run.start < k.shape[1]:
        k, v = k[:, run.start : run.stop], v[:, run.start : run.stop]
    return k, v


def forward_over(
    past: KeyValueCache, record: SavedForward, q: torch.Tensor, sees: AttentionSpec, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (result, log-sum-exp) of the slice's queries over their own chunk and the visible earlier chunks. `sinks`
    (H,) are scores of a further key for each head, whose value is zero."""
    if not q.shape[1]:
        return q[..., : past.chunks[record.slice][1].shape[3]].clone(), q.new_empty(
            (q.shape[0], q.shape[2], 0), dtype=statistics_dtype(q.dtype)
        )
    runs = key_runs(past, record, q, sees)
    own_run = next(runs)
    out, lse = attend_forward(sees.call_kernel(own_run.causal), q, *run_keys(past, own_run), own_run.mask)
    for run in runs:
        more, more_lse = attend_forward(sees.call_kernel(causal=False), q, *run_keys(past, run), run.mask)
        if out.dtype != lse.dtype:
            out = out.to(lse.dtype)
        out.lerp_(more.to(lse.dtype), (more_lse - lse).sigmoid_().transpose(1, 2).unsqueeze(-1))
        lse = torch.logaddexp(lse, more_lse)
        del more
    if sinks is not None:
        without, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        out = out.to(lse.dtype) * (without - lse).exp_().transpose(1, 2).unsqueeze(-1)
    return out.to(q.dtype), lse


def sink_gradient(
    sinks: torch.Tensor | None, dy: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor | None:
    """Return the gradient of the sinks, from the result and log-sum-exp with them; None without sinks. A sink's value
    is zero, so the derivative of a query's result is its weight times the negative result."""
    if sinks is None:
        return None
    weights = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp_()
    products = (dy.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    return -(weights * products).sum((0, 2)).to(sinks.dtype)


def backward_over(
    past: KeyValueCache,
    record: SavedForward,
    dy: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sees: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the slice's q, k and v, including those added by later slices; gradients of earlier keys
    and values go into `past`."""
    if not q.shape[1]:
        return torch.zeros_like(q), *past.take_gradients(
            record.slice, *map(torch.zeros_like, past.chunks[record.slice])
        )
    runs = key_runs(past, record, q, sees)
    own_run = next(runs)
    dq, dk, dv = attend_backward(
        sees.call_kernel(own_run.causal), dy, q, *run_keys(past, own_run), out, lse, own_run.mask
    )
    k, v = past.chunks[record.slice]
    if own_run.stop - own_run.start < k.shape[1]:
        dk, dv = pad_zeros(k, dk, own_run), pad_zeros(v, dv, own_run)
    settled = False
    for run in runs:
        if run.slice_ != record.slice and not settled:
            dk, dv = past.take_gradients(record.slice, dk, dv)
            settled = True
        more, dk_owed, dv_owed = attend_backward(
            sees.call_kernel(causal=False), dy, q, *run_keys(past, run), out, lse, run.mask
        )
        if dq.dtype != lse.dtype:
            dq = dq.to(lse.dtype)
        dq.add_(more)
        del more
        if run.slice_ == record.slice:
            dk[:, : run.stop].add_(dk_owed)
            dv[:, : run.stop].add_(dv_owed)
        else:
            past.add_gradients(run.slice_, dk_owed, dv_owed)
    if not settled:
        dk, dv = past.take_gradients(record.slice, dk, dv)
    return dq.to(q.dtype), dk, dv


def pad_zeros(like: torch.Tensor, part: torch.Tensor, run: KeyRun) -> torch.Tensor:
    """Return the gradient of all keys of a slice, zero outside of the run `part`."""
    full = torch.zeros_like(like)
    full[:, run.start : run.stop] = part
    return full
