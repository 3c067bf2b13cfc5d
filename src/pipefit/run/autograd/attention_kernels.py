"""Attention of some queries to one run of keys, forward with the log-sum-exp and backward from any log-sum-exp.

Attention to several runs of keys is the mean of their results, weighted by their log-sum-exps. Its backward is the sum
of the backwards over the runs, each with the result and the log-sum-exp over *all* runs (Ring Attention, Liu et al.,
2023; FlashAttention-2, Dao, 2023). PyTorch's public attention does not return the log-sum-exp, so this file alone calls
the private operators of its kernels: names and arguments are those of PyTorch 2.11 to 2.13. A kernel is tested once per
device, type and kind of call against the plain one at the end of this file, which replaces a kernel that is missing or
differs.

Shapes: q (B, T, H, K); k, v (B, S, G, K), H a multiple of G; log-sum-exps (B, H, T) in float32 or wider. A mask is
added to the scores, (B or 1, 1, T, S) in the type of q. `causal` needs T = S: query i attends to keys 0 to i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from pipefit.model.ops.attention import QUERY_BLOCK

Tensor = torch.Tensor
ALIGNMENT = 32
"""The memory-efficient kernel needs rows of log-sum-exps padded to a multiple of this, masks to half of it."""

LOW = -1e3
"""A log-sum-exp below this belongs to a query without visible keys."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The settings shared by all calls of an operator."""

    scale: float
    causal: bool
    softcap: float | None = None
    "Scores s become softcap tanh(s / softcap) before the mask, in the plain kernel."


class AttentionKernel(NamedTuple):
    """A pair of functions over the shapes above: (out, log-sum-exp), and (dq, dk, dv) in the type of q."""

    forward: Callable[[AttentionCall, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[[AttentionCall, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Any]
    takes: Callable[[str, torch.dtype, bool], bool]
    "(device type, type of q, masked) -> True if the kernel supports this combination."


def attend_forward(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out (B, T, H, features of v) in the type of q, log-sum-exp of the scaled and masked scores)."""
    size = v.shape[3]
    out, lse = _kernel_for(q, k, call, mask).forward(call, q, k, _pad_features(v, q), mask)
    return _cut_features(out, size), lse


def attend_backward(
    call: AttentionCall,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return these keys' addends to (dq, dk, dv); `out` and `lse` are those over all keys that the queries attend
    to."""
    size = v.shape[3]
    dy, v, out = (_pad_features(x, q) for x in (dy, v, out))
    dq, dk, dv = _kernel_for(q, k, call, mask).backward(call, dy, q, k, v, out, lse, mask)
    return dq, dk, _cut_features(dv, size)


def _cut_features(x: Tensor, size: int) -> Tensor:
    """Return the first features of x, copied if there are more: a view would keep the zeros alive."""
    return x if x.shape[3] == size else x[..., :size].contiguous()


def _pad_features(x: Tensor, q: Tensor) -> Tensor:
    """Return x padded to the features of q. The kernels take heads of one size, and zeros change nothing."""
    missing = q.shape[3] - x.shape[3]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _kernel_for(q: Tensor, k: Tensor, call: AttentionCall, mask: Tensor | None) -> AttentionKernel:
    if call.softcap is not None:
        return CAPPED
    return choose_kernel(q.device, q.dtype, mask is not None, call.causal, q.shape[2] != k.shape[2], q.shape[3])


@cache
def choose_kernel(
    device: torch.device, dtype: torch.dtype, masked: bool, causal: bool, grouped: bool, features: int
) -> AttentionKernel:
    """Return the first kernel that supports such calls and agrees with the plain one on this device."""
    made_for_it = [kernel for kernel in KERNELS if kernel.takes(device.type, dtype, masked)]
    kind = (device, dtype, masked, causal, grouped, features)
    return next((kernel for kernel in made_for_it if _agrees_with_plain(kernel, *kind)), PLAIN_KERNEL)


def _agrees_with_plain(
    kernel: AttentionKernel,
    device: torch.device,
    dtype: torch.dtype,
    masked: bool,
    causal: bool,
    grouped: bool,
    features: int,
) -> bool:
    """Compare a small call with the plain kernel, given a result and log-sum-exp over more keys than the call has."""
    generator = torch.Generator().manual_seed(1)

    def draw_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    tokens, keys, heads = 19, 19 if causal else 37, 4
    call = AttentionCall(features**-0.5, causal)
    q, dy = draw_tensor(2, tokens, heads, features), draw_tensor(2, tokens, heads, features)
    k, v = (draw_tensor(2, keys, 2 if grouped else heads, features) for _ in range(2))
    mask = None
    if masked:
        mask = torch.zeros(2, 1, tokens, keys, dtype=dtype, device=device)
        mask[1, :, 3:5] = hidden_score(dtype)
        mask[:, :, :, -4:] = hidden_score(dtype)
    try:
        results = kernel.forward(call, q, k, v, mask)
        expected = PLAIN_KERNEL.forward(call, q, k, v, mask)
        more = (0.5 * expected[0] + 0.1, torch.logaddexp(expected[1], torch.ones_like(expected[1])))
        results += tuple(kernel.backward(call, dy, q, k, v, *more, mask))
        expected += tuple(PLAIN_KERNEL.backward(call, dy, q, k, v, *more, mask))
    except (RuntimeError, AttributeError, TypeError):
        return False
    # A query without visible keys has an arbitrary result, which has no weight.
    seen = (expected[1] > LOW).transpose(1, 2).unsqueeze(-1)
    results, expected = ((torch.where(seen, out, 0), *rest) for out, *rest in (results, expected))
    bound = 32 * torch.finfo(dtype).eps
    return all(
        result.shape == reference.shape and _is_close(result, reference, bound)
        for result, reference in zip(results, expected, strict=True)
    )


def _is_close(one: Tensor, two: Tensor, bound: float) -> bool:
    """Return True if the tensors agree to `bound` of the largest entry. Log-sum-exps below LOW count as equal."""
    one, two = (x.double().clamp(min=LOW) for x in (one, two))
    return bool((one - two).abs().max() <= bound * (1 + two[two > LOW].abs().max()))


def hidden_score(dtype: torch.dtype) -> float:
    """Return the mask's addend for a hidden key. It is finite: a query without visible keys in a run still has a result
    there, with a log-sum-exp so low that it has no weight."""
    return -torch.finfo(dtype).max / 2


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of statistics and sums: float32, or float64 if the run computes in float64."""
    return torch.promote_types(dtype, torch.float32)


# PyTorch's flash attention for CPUs: every floating type, masks, and grouped heads (`_groups_are_native`).


def _cpu_takes(device: str, dtype: torch.dtype, masked: bool) -> bool:
    return device == "cpu" and dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _cpu_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    k, v = _repeat_heads(q, k), _repeat_heads(q, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, call.causal, attn_mask=mask, scale=call.scale
    )
    return out.transpose(1, 2), lse


def _cpu_backward(
    call: AttentionCall, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None
) -> Any:
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in (dy, q, _repeat_heads(q, k), _repeat_heads(q, v), out)), _to_token_major(lse), 0.0,
        call.causal, attn_mask=mask, scale=call.scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, _fold_heads(dk, k), _fold_heads(dv, k)


@cache
def _groups_are_native() -> bool:
    """Return True if the CPU kernel reads grouped heads itself, that is if PyTorch's own attention passes them
    unrepeated. Otherwise keys and values are repeated for every head for the duration of a call."""
    q = torch.ones(1, 2, 1, 8, requires_grad=True)
    k = torch.ones(1, 1, 1, 8, requires_grad=True)
    with torch.enable_grad():  # the first call may be inside an autograd function
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    saved = getattr(out.grad_fn, "_saved_key", None)
    return saved is not None and saved.shape[1] == 1


def _repeat_heads(q: Tensor, k: Tensor) -> Tensor:
    if q.shape[2] == k.shape[2] or (q.device.type == "cpu" and _groups_are_native()):
        return k
    return k.repeat_interleave(q.shape[2] // k.shape[2], 2)


def _fold_heads(gradient: Tensor, k: Tensor) -> Tensor:
    """Return the gradient of k, from that of the result of `_repeat_heads`."""
    if gradient.shape[2] == k.shape[2]:
        return gradient
    return gradient.unflatten(2, (k.shape[2], -1)).sum(3)


def _to_token_major(lse: Tensor) -> Tensor:
    """Return (B, H, T) in the memory order of the CPU kernel: heads of a token are adjacent."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


# FlashAttention-2 on CUDA: half types, grouped heads, no masks.


def _flash_takes(device: str, dtype: torch.dtype, masked: bool) -> bool:
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and not masked


def _flash_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, call.causal, False, scale=call.scale
    )
    return out, lse


def _flash_backward(
    call: AttentionCall, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None
) -> Any:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state of the generator, for a dropout of zero
    return torch.ops.aten._flash_attention_backward(
        dy.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0,
        call.causal, state, torch.zeros((), dtype=torch.uint64, device=q.device), scale=call.scale,
    )  # fmt: skip


# The memory-efficient kernel on CUDA: float32 too, masks, heads repeated.


def _efficient_takes(device: str, dtype: torch.dtype, masked: bool) -> bool:
    return device == "cuda" and dtype in (torch.float32, torch.bfloat16, torch.float16)


def _efficient_forward(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *(x.transpose(1, 2) for x in (q, _repeat_heads(q, k), _repeat_heads(q, v))), _align_mask(mask, q), True, 0.0,
        call.causal, scale=call.scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse[:, :, : q.shape[1]]


def _efficient_backward(
    call: AttentionCall, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None
) -> Any:
    rows = q.shape[1]
    padded = torch.full(
        (*lse.shape[:2], math.ceil(rows / ALIGNMENT) * ALIGNMENT), math.inf, dtype=lse.dtype, device=lse.device
    )
    padded[:, :, :rows] = lse
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *(x.transpose(1, 2) for x in (dy, q, _repeat_heads(q, k), _repeat_heads(q, v))), _align_mask(mask, q),
        out.transpose(1, 2), padded, nothing, nothing, 0.0, [True, True, True, False], call.causal, scale=call.scale,
    )  # fmt: skip
    return dq.transpose(1, 2), _fold_heads(dk.transpose(1, 2), k), _fold_heads(dv.transpose(1, 2), k)


def _align_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the mask expanded to every row and head, its rows aligned as the kernel requires."""
    if mask is None:
        return None
    keys, step = mask.shape[3], ALIGNMENT // 2
    room = mask.new_empty(*mask.shape[:3], math.ceil(keys / step) * step)
    room[..., :keys] = mask
    return room[..., :keys].expand(q.shape[0], q.shape[2], -1, -1)


# Plain products and a softmax: any device and type, the full matrix of scores in float32 or wider.


def _scaled_scores(call: AttentionCall, q: Tensor, k: Tensor) -> Tensor:
    """Return the scores (B, G, H / G, T, S) before the mask, in float32 or wider."""
    wide = statistics_dtype(q.dtype)
    grouped = q.to(wide).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("btgrk,bsgk->bgrts", grouped, k.to(wide)) * call.scale
    return scores if call.softcap is None else (scores / call.softcap).tanh_() * call.softcap


def _mask_scores(call: AttentionCall, scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the scores with a large negative number for hidden keys. With a causal mask the last query sees all
    keys."""
    queries, keys = scores.shape[-2:]
    if call.causal:
        above = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - queries)
        scores = scores.masked_fill(above, hidden_score(scores.dtype))
    return scores if mask is None else scores + mask.to(scores.dtype).unsqueeze(2)


def _plain_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = _mask_scores(call, _scaled_scores(call, q, k), mask)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bgrts,bsgk->btgrk", (scores - lse.unsqueeze(-1)).exp(), v.to(scores.dtype))
    return out.flatten(2, 3).to(q.dtype), lse.flatten(1, 2)


def _plain_backward(
    call: AttentionCall, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None
) -> Any:
    groups, wide = (k.shape[2], -1), statistics_dtype(q.dtype)
    scores = _scaled_scores(call, q, k)
    weights = (_mask_scores(call, scores, mask) - lse.unflatten(1, groups).unsqueeze(-1)).exp()
    dy_BTGRK = dy.to(wide).unflatten(2, groups)
    dv = torch.einsum("bgrts,btgrk->bsgk", weights, dy_BTGRK)
    delta = (dy.to(wide) * out.to(wide)).sum(-1).transpose(1, 2).unflatten(1, groups).unsqueeze(-1)
    dscores = weights * (torch.einsum("btgrk,bsgk->bgrts", dy_BTGRK, v.to(wide)) - delta) * call.scale
    if call.softcap is not None:
        dscores = dscores * (1.0 - (scores / call.softcap).square())
    dq = torch.einsum("bgrts,bsgk->btgrk", dscores, k.to(wide)).flatten(2, 3)
    dk = torch.einsum("bgrts,btgrk->bsgk", dscores, q.to(wide).unflatten(2, groups))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


# Capped scores, which no fused kernel of PyTorch computes: the plain kernel, some queries at a time.


def _query_blocks(call: AttentionCall, q: Tensor, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yield (queries, keys that they can see) of calls of at most QUERY_BLOCK queries."""
    for start in range(0, q.shape[1], QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q.shape[1])
        yield slice(start, stop), slice(0, stop if call.causal else keys)


def _capped_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    parts = [
        _plain_forward(call, q[:, rows], k[:, seen], v[:, seen], None if mask is None else mask[:, :, rows, seen])
        for rows, seen in _query_blocks(call, q, k.shape[1])
    ]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)


def _capped_backward(call: AttentionCall, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *results: Any) -> Any:
    out, lse, mask = results
    wide = statistics_dtype(q.dtype)
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, seen in _query_blocks(call, q, k.shape[1]):
        inner = None if mask is None else mask[:, :, rows, seen]
        dq[:, rows], more_k, more_v = _plain_backward(
            call, dy[:, rows], q[:, rows], k[:, seen], v[:, seen], out[:, rows], lse[:, :, rows], inner
        )
        dk[:, seen].add_(more_k)
        dv[:, seen].add_(more_v)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


CAPPED = AttentionKernel(_capped_forward, _capped_backward, lambda device, dtype, masked: True)
PLAIN_KERNEL = AttentionKernel(_plain_forward, _plain_backward, lambda device, dtype, masked: True)
KERNELS = (
    AttentionKernel(_cpu_forward, _cpu_backward, _cpu_takes),
    AttentionKernel(_flash_forward, _flash_backward, _flash_takes),
    AttentionKernel(_efficient_forward, _efficient_backward, _efficient_takes),
)
