"""cross_entropy(logits, labels) {ignore_index}: the sum of the losses over the labels that count.

logits (B, T, V), labels (B, T) int64, result () in float32 or wider. The sum, not the mean: the step's divisor is
known before any forward, so microbatches, slices and replicas add up exactly. Kept for the backward: the logits and
one log-sum-exp a token; the softmax is made again, some rows at a time, so that no second (B, T, V) tensor in a wide
type exists.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.model.ops.cross_entropy import CHUNK_NUMBERS
from pipefit.run.ops import Context, Step


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignore: int, wide: torch.dtype) -> torch.Tensor:
        flat, label = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        total = torch.empty(flat.shape[0], dtype=wide, device=flat.device)
        for start, stop in chunks(flat):
            torch.logsumexp(flat[start:stop].to(wide), 1, out=total[start:stop])
        counts = label != ignore
        picked = flat.gather(1, torch.where(counts, label, 0).unsqueeze(1)).squeeze(1)
        ctx.ignore = ignore
        ctx.save_for_backward(logits, labels, total)
        return torch.where(counts, total - picked, 0).sum()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        logits, labels, total = ctx.saved_tensors
        flat, label = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        counts = label != ctx.ignore
        label = torch.where(counts, label, 0).unsqueeze(1)
        weight = torch.where(counts, dy, 0).unsqueeze(1)
        dx = torch.empty_like(flat)
        for start, stop in chunks(flat):
            same = dx.dtype == total.dtype
            p = dx[start:stop].copy_(flat[start:stop]) if same else flat[start:stop].to(total.dtype)
            p.sub_(total[start:stop].unsqueeze(1)).exp_().mul_(weight[start:stop])
            p.scatter_add_(1, label[start:stop], -weight[start:stop])
            if not same:
                dx[start:stop] = p
        return dx.view(logits.shape), None, None, None


def chunks(flat: torch.Tensor) -> list[tuple[int, int]]:
    """Runs of rows with at most CHUNK_NUMBERS numbers each."""
    rows, step = flat.shape[0], max(1, CHUNK_NUMBERS // flat.shape[1])
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def build(operator: Operator, context: Context) -> Step:
    ignore = int(operator.attributes.get("ignore_index", -100))
    wide = torch.promote_types(context.dtype, torch.float32)
    apply = _CrossEntropy.apply
    return Step(lambda logits, labels: apply(logits, labels, ignore, wide))


BUILDERS = {"cross_entropy": build}
