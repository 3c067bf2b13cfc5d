"""The part of a decoder layer behind attention: an MLP, or a mixture of experts with or without a shared expert.

Shape suffixes: B rows, T tokens, D features, F features of the MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipefit.model.families.common import ACTIVATIONS
from pipefit.model.families.decoder.moe import MoELayer
from pipefit.model.families.decoder.options import DecoderOptions, ExpertOptions


class DecoderMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    def __init__(self, options: DecoderOptions, size: int) -> None:
        super().__init__()
        features, bias = options.hidden_size, options.mlp_bias
        self.gate_proj = nn.Linear(features, size, bias=bias) if options.gated else None
        self.up_proj = nn.Linear(features, size, bias=bias)
        self.down_proj = nn.Linear(size, features, bias=bias)
        self.activation = options.activation

    def forward(self, x_BTD: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.activation]
        if self.gate_proj is None:
            return self.down_proj(activation(self.up_proj(x_BTD)))
        return self.down_proj(activation(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class SharedMoELayer(nn.Module):
    """A mixture of experts, and an expert that sees every token; its output may have a gate of one sigmoid."""

    def __init__(self, options: DecoderOptions, experts: ExpertOptions) -> None:
        super().__init__()
        self.routed = make_moe(options, experts)
        self.shared_expert = DecoderMLP(options, experts.shared_size)
        self.shared_expert_gate = nn.Linear(options.hidden_size, 1, bias=False) if experts.shared_gate else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        shared_BTD = self.shared_expert(x_BTD)
        if self.shared_expert_gate is not None:
            shared_BTD = torch.sigmoid(self.shared_expert_gate(x_BTD)) * shared_BTD
        return self.routed(x_BTD) + shared_BTD


def make_mlp(options: DecoderOptions, layer: int) -> nn.Module:
    """Return the MLP or the mixture of experts of a layer."""
    experts = options.experts
    if experts is None or layer not in experts.layers:
        return DecoderMLP(options, options.mlp_size)
    return SharedMoELayer(options, experts) if experts.shared_size else make_moe(options, experts)


def make_moe(options: DecoderOptions, experts: ExpertOptions) -> MoELayer:
    """Return a mixture of routed experts."""
    return MoELayer(options.hidden_size, experts, options.activation)
