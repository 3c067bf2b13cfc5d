"""Selection of experts and their gates, by the attributes of the operators `moe` and `moe_shard`.

Shapes: logits (N, E) of N tokens and E experts; weights and selected experts (N, top_k).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from pipefit.run.ops import Builder

BUILDERS: dict[str, Builder] = {}
"""`moe.py` and `moe_shard.py` use these functions."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def select_experts(
    attributes: Mapping[str, Any], logits: torch.Tensor, wide: torch.dtype, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights in the wide dtype, numbers) of the selected experts of every token."""
    top = int(attributes["top_k"])
    if attributes.get("scores", "softmax") == "softmax":
        scores = torch.softmax(logits, -1, dtype=wide)
    else:
        scores = logits.to(wide).sigmoid()
    if correction is None and "groups" not in attributes:
        weights, chosen = scores.topk(top, -1)
    else:
        chosen = _choose_within_groups(attributes.get("groups"), scores.detach(), correction).topk(top, -1).indices
        weights = scores.gather(1, chosen)
    if attributes["normalize"]:
        weights = weights / weights.sum(-1, keepdim=True)
    scale = float(attributes.get("weight_scale", 1.0))
    return weights if scale == 1.0 else weights * scale, chosen


def _choose_within_groups(
    groups: Sequence[int] | None, scores: torch.Tensor, correction: torch.Tensor | None
) -> torch.Tensor:
    """Return the corrected scores, minus infinity outside of each token's best groups. A group counts by the sum of its
    best scores."""
    if correction is not None:
        scores = scores + correction.detach()
    if groups is None:
        return scores
    count, chosen, best = groups
    grouped = scores.unflatten(-1, (count, -1))
    sums = grouped.topk(best, -1).values.sum(-1)
    closed = torch.ones_like(sums, dtype=torch.bool).scatter_(1, sums.topk(chosen, -1).indices, False)
    return grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)


def gate_function(attributes: Mapping[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function of gate and up, joined along the last dimension, that feeds the last projection."""
    if "clamp" in attributes:
        gain, limit = attributes["clamp"]

        def clamped_gate(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, -1)
            gate = gate.clamp(max=limit)
            return gate * (gain * gate).sigmoid() * (up.clamp(-limit, limit) + 1.0)

        return clamped_gate
    activation = ACTIVATIONS[attributes["activation"]]

    def plain_gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    return plain_gate
