"""Mixture of gated experts (Mixtral, Qwen3-MoE) in plain PyTorch, expert by expert. No auxiliary router loss.

Shape suffixes: B rows, T tokens, N = B*T, D features, E experts, F features of an expert, S selected experts a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipefit.model.families.common import ACTIVATIONS, OperatorModule, statistics_dtype


class MoERouter(nn.Module):
    """The router's weight, a module so that it has Hugging Face's name `gate.weight`."""

    def __init__(self, experts: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, features))


class MoEExperts(nn.Module):
    """The weights of all experts, stacked; gate above up."""

    def __init__(self, experts: int, features: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, features))
        self.down_proj = nn.Parameter(torch.empty(experts, features, inner))


class MoELayer(OperatorModule):
    """The operator `moe`."""

    kind = "moe"

    def __init__(self, features: int, inner: int, experts: int, top_k: int, normalize: bool, activation: str) -> None:
        super().__init__()
        self.gate = MoERouter(experts, features)
        self.experts = MoEExperts(experts, features, inner)
        self.top_k = top_k
        self.normalize = normalize
        self.activation = activation

    def operator_attributes(self) -> dict[str, Any]:
        return {
            "experts": self.gate.weight.shape[0],
            "top_k": self.top_k,
            "normalize": self.normalize,
            "activation": self.activation,
        }

    def operator_parameters(self) -> tuple[str, ...]:
        return ("gate.weight", "experts.gate_up_proj", "experts.down_proj")

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        logits_NE = F.linear(x_ND, self.gate.weight)
        probability_NE = F.softmax(logits_NE, dim=-1, dtype=statistics_dtype(x_ND.dtype))
        weight_NS, selected_NS = torch.topk(probability_NE, self.top_k, dim=-1)
        if self.normalize:
            weight_NS = weight_NS / weight_NS.sum(dim=-1, keepdim=True)
        weight_NS = weight_NS.to(x_ND.dtype)
        y_ND = torch.zeros_like(x_ND)
        for expert in range(self.gate.weight.shape[0]):
            token, slot = torch.where(selected_NS == expert)
            gate, up = F.linear(x_ND[token], self.experts.gate_up_proj[expert]).chunk(2, dim=-1)
            inner = ACTIVATIONS[self.activation](gate) * up
            output = F.linear(inner, self.experts.down_proj[expert]) * weight_NS[token, slot, None]
            y_ND = y_ND.index_add(0, token, output)
        return y_ND.view_as(x_BTD)
