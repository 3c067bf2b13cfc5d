"""cross_entropy(logits, labels) {ignore_index}: the sum of the losses over the labels that are not ignored.

logits (B, T, V), labels (B, T) int64, result () in float32 or wider. The result is the sum, not the mean: the step's
divisor is known before any forward, so microbatches, slices and replicas add up exactly. Saved for the backward: the
logits and one log-sum-exp per token. The softmax is recomputed a few rows at a time, so no second (B, T, V) tensor in a
wide type exists.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.model.ops.cross_entropy import CHUNK_NUMBERS
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.sharded.internal_collectives import reduce_in_place


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignore: int, wide: torch.dtype) -> torch.Tensor:
        flat, label = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        total = torch.empty(flat.shape[0], dtype=wide, device=flat.device)
        for start, stop in row_chunks(flat):
            torch.logsumexp(flat[start:stop].to(wide), 1, out=total[start:stop])
        counts = label != ignore
        picked = flat.gather(1, torch.where(counts, label, 0).unsqueeze(1)).squeeze(1)
        ctx.ignore = ignore
        ctx.save_for_backward(logits, labels, total)
        return torch.where(counts, total - picked, 0).sum()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        logits, labels, total = ctx.saved_tensors
        label = labels.reshape(-1)
        counts = label != ctx.ignore
        return softmax_gradient(logits, total, torch.where(counts, dy, 0), label, counts), None, None, None


class _CrossEntropyShard(torch.autograd.Function):
    """This device's addend: the log-sum-exps (over the full vocabulary) on the first device, minus the logits of its
    own labels. The backward needs no communication."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignore: int, wide: torch.dtype, first: int, shard: Any
    ) -> torch.Tensor:
        flat, label = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        peak = reduce_in_place(flat.amax(1).to(wide), shard, "max")
        total = torch.empty_like(peak)
        for start, stop in row_chunks(flat):
            torch.sum((flat[start:stop].to(wide) - peak[start:stop].unsqueeze(1)).exp_(), 1, out=total[start:stop])
        total = reduce_in_place(total, shard).log_().add_(peak)
        counts = label != ignore
        local = counts & (label >= first) & (label < first + flat.shape[1])
        picked = flat.gather(1, torch.where(local, label - first, 0).unsqueeze(1)).squeeze(1)
        ctx.ignore, ctx.first = ignore, first
        ctx.save_for_backward(logits, labels, total)
        sums = torch.where(counts, total, 0) if shard.position == 0 else torch.zeros_like(total)
        return (sums - torch.where(local, picked, 0)).sum()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        logits, labels, total = ctx.saved_tensors
        label = labels.reshape(-1)
        local = (label >= ctx.first) & (label < ctx.first + logits.shape[-1]) & (label != ctx.ignore)
        dx = softmax_gradient(logits, total, torch.where(label != ctx.ignore, dy, 0), label - ctx.first, local)
        return dx, None, None, None, None, None


def softmax_gradient(
    logits: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, label: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """Return weight x (softmax(logits) - one at `label` where `own`), a few rows at a time; `total` are
    log-sum-exps."""
    flat = logits.reshape(-1, logits.shape[-1])
    label, weight = torch.where(own, label, 0).unsqueeze(1), weight.unsqueeze(1)
    less = torch.where(own.unsqueeze(1), -weight, 0)
    dx = torch.empty_like(flat)
    for start, stop in row_chunks(flat):
        same = dx.dtype == total.dtype
        p = dx[start:stop].copy_(flat[start:stop]) if same else flat[start:stop].to(total.dtype)
        p.sub_(total[start:stop].unsqueeze(1)).exp_().mul_(weight[start:stop])
        p.scatter_add_(1, label[start:stop], less[start:stop])
        if not same:
            dx[start:stop] = p
    return dx.view(logits.shape)


def row_chunks(flat: torch.Tensor) -> list[tuple[int, int]]:
    """Return runs of rows with at most CHUNK_NUMBERS numbers each."""
    rows, step = flat.shape[0], max(1, CHUNK_NUMBERS // flat.shape[1])
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def build_cross_entropy(operator: Operator, context: OperatorContext) -> OperatorStep:
    ignore = int(operator.attributes.get("ignore_index", -100))
    wide = torch.promote_types(context.dtype, torch.float32)
    apply = _CrossEntropy.apply
    return OperatorStep(lambda logits, labels: apply(logits, labels, ignore, wide))


def build_cross_entropy_shard(operator: Operator, context: OperatorContext) -> OperatorStep:
    ignore, first = int(operator.attributes.get("ignore_index", -100)), int(operator.attributes["first"])
    wide, shard = torch.promote_types(context.dtype, torch.float32), context.shard
    apply = _CrossEntropyShard.apply
    return OperatorStep(lambda logits, labels: apply(logits, labels, ignore, wide, first, shard))


BUILDERS = {"cross_entropy": build_cross_entropy, "cross_entropy_shard": build_cross_entropy_shard}
