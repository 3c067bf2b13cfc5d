"""cross_entropy(logits, labels) {ignore_index}: the sum of the losses over the labels that count.

logits (B, T, V), labels (B, T) int64, result () in float32 or wider. The sum, not the mean: the step's divisor is
known before any forward, so microbatches, slices and replicas add up exactly.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.ops import Context, Step


def build(operator: Operator, context: Context) -> Step:
    ignore = int(operator.attributes.get("ignore_index", -100))
    wide = torch.float64 if context.dtype == torch.float64 else torch.float32

    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = logits.reshape(-1, logits.shape[-1]).to(wide)
        return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=ignore, reduction="sum")

    return Step(cross_entropy)


BUILDERS = {"cross_entropy": build}
