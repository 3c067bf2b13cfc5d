"""Mixture of gated experts in plain PyTorch, expert by expert. No auxiliary router loss.

Shape suffixes: B rows, T tokens, N = B*T, D features, E experts, F features of an expert, S selected experts a token, G
groups of experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipefit.model.families.common import ACTIVATIONS, OperatorModule, statistics_dtype
from pipefit.model.families.decoder.options import ExpertOptions


class MoERouter(nn.Module):
    """The router's weight, a module so that it has Hugging Face's name `gate.weight`; a bias, or a correction of the
    scores by which experts are selected, which is not trained."""

    def __init__(self, features: int, options: ExpertOptions) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(options.experts, features))
        self.bias = nn.Parameter(torch.empty(options.experts)) if options.biases else None
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(options.experts), requires_grad=False) if options.correction else None
        )


class MoEExperts(nn.Module):
    """The weights of all experts, stacked; gate above up."""

    def __init__(self, features: int, options: ExpertOptions) -> None:
        super().__init__()
        experts, inner = options.experts, options.size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, features))
        self.down_proj = nn.Parameter(torch.empty(experts, features, inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * inner)) if options.biases else None
        self.down_proj_bias = nn.Parameter(torch.empty(experts, features)) if options.biases else None


class MoELayer(OperatorModule):
    """The operator `moe`."""

    kind = "moe"

    def __init__(self, features: int, options: ExpertOptions, activation: str) -> None:
        super().__init__()
        self.gate = MoERouter(features, options)
        self.experts = MoEExperts(features, options)
        self.options, self.activation = options, activation

    def operator_attributes(self) -> dict[str, Any]:
        return self.options.operator_attributes(self.activation)

    def operator_parameters(self) -> tuple[str, ...]:
        further = self.options.further_parameters.values()
        return ("gate.weight", "experts.gate_up_proj", "experts.down_proj", *further)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        weight_NS, selected_NS = self._select_experts(F.linear(x_ND, self.gate.weight, self.gate.bias))
        y_ND = torch.zeros_like(x_ND)
        experts = self.experts
        for expert in range(self.options.experts):
            token, slot = torch.where(selected_NS == expert)
            biases = [None if b is None else b[expert] for b in (experts.gate_up_proj_bias, experts.down_proj_bias)]
            gate, up = F.linear(x_ND[token], experts.gate_up_proj[expert], biases[0]).chunk(2, dim=-1)
            output = F.linear(self._multiply_gate(gate, up), experts.down_proj[expert], biases[1])
            y_ND = y_ND.index_add(0, token, output * weight_NS[token, slot, None].to(x_ND.dtype))
        return y_ND.view_as(x_BTD)

    def _select_experts(self, logits_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the selected experts."""
        wide_NE = logits_NE.to(statistics_dtype(logits_NE.dtype))
        score_NE = torch.sigmoid(wide_NE) if self.options.scores == "sigmoid" else F.softmax(wide_NE, dim=-1)
        choice_NE = score_NE.detach()
        if self.gate.e_score_correction_bias is not None:
            choice_NE = choice_NE + self.gate.e_score_correction_bias
        if self.options.groups is not None:
            count, chosen, best = self.options.groups
            group_NG = choice_NE.unflatten(-1, (count, -1)).topk(best, dim=-1).values.sum(dim=-1)
            open_NG = torch.zeros_like(group_NG).scatter(1, group_NG.topk(chosen, dim=-1).indices, 1.0)
            closed_NE = (open_NG == 0).repeat_interleave(choice_NE.shape[-1] // count, dim=-1)
            choice_NE = choice_NE.masked_fill(closed_NE, -torch.inf)
        selected_NS = choice_NE.topk(self.options.top_k, dim=-1).indices
        weight_NS = score_NE.gather(1, selected_NS)
        if self.options.normalize:
            weight_NS = weight_NS / weight_NS.sum(dim=-1, keepdim=True)
        return weight_NS * self.options.weight_scale, selected_NS

    def _multiply_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.options.clamp is None:
            return ACTIVATIONS[self.activation](gate) * up
        gain, limit = self.options.clamp
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return gate * torch.sigmoid(gain * gate) * (up + 1.0)
