"""The image generator as plain layers: a diffusion transformer that predicts the velocity of a flow.

Flow matching with straight paths (Lipman et al., 2023; Liu et al., 2023): at time t in [0, 1] the latents of an image
are (1 - t) noise + t data, and the model predicts their velocity, data - noise. Images are packed into one row, with
one time per image. Every latent token is conditioned on one hidden state of the language model, added to it. The time
modulates every block (adaptive layer norm, Peebles and Xie, 2023): shift, scale and gate are linear in its Fourier
features. Gates are 1 + a learned value, so that no branch starts at zero.

Inputs from the step plan, of L latent tokens: `noisy` (1,L,C), `time` (1,L) float32 or wider, `grid` int64 (1,L,4),
`documents` int64 (1,L), `target` (1,L,C) float32 or wider. Shape suffixes: B rows (one), T latent tokens, D features, C
numbers of a latent token, F Fourier features.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipefit.model.families.multimodal.diffusion_config import DiffusionConfig
from pipefit.model.families.multimodal.packed import FourierFeatures, ImagePositions, SquaredError
from pipefit.model.families.multimodal.vision_layers import VisionAttention, VisionMLP
from pipefit.model.graph import TensorSpec as GraphInput

TIME = GraphInput(name="time", shape=("B", "T"), dtype="float32", role="data")


class DiffusionEmbed(nn.Module):
    """Conditioning x (B,T,language features) -> (B,T,D): projected conditioning plus projected noisy latents plus
    positions."""

    def __init__(self, config: DiffusionConfig, condition_features: int) -> None:
        super().__init__()
        self.x_shape = ("B", "T", condition_features)
        self.data_inputs = (
            GraphInput(name="noisy", shape=("B", "T", config.latent_size), role="data"),
            GraphInput(name="grid", shape=("B", "T", 4), dtype="int64", role="data"),
        )
        self.condition = nn.Linear(condition_features, config.hidden_size)
        self.latent = nn.Linear(config.latent_size, config.hidden_size)
        self.positions = ImagePositions(config.grid_size, config.hidden_size, start=False)

    def forward(self, x: Tensor, noisy: Tensor, grid: Tensor) -> Tensor:
        return self.positions(self.condition(x) + self.latent(noisy), grid)


class DiffusionModulation(nn.Module):
    """norm(x) (1 + scale(time)) + shift(time), and 1 + gate(time): each linear in the features of the time."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        features, inner = config.hidden_size, 2 * config.time_frequencies
        self.scale = nn.Linear(inner, features)
        self.shift = nn.Linear(inner, features)
        self.gate = nn.Linear(inner, features)
        self.eps = config.layer_norm_eps

    def forward(self, x_BTD: Tensor, time_BTF: Tensor) -> tuple[Tensor, Tensor]:
        normal = F.layer_norm(x_BTD, x_BTD.shape[-1:], None, None, self.eps)
        return normal * (self.scale(time_BTF) + 1.0) + self.shift(time_BTF), self.gate(time_BTF) + 1.0


class DiffusionBlock(nn.Module):
    """x + gate * attention(modulated x), then x + gate * mlp(modulated x)."""

    data_inputs = (TIME,)

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.features = FourierFeatures(config.time_frequencies)
        self.modulation1 = DiffusionModulation(config)
        self.attention = VisionAttention(config.hidden_size, config.num_attention_heads)
        self.modulation2 = DiffusionModulation(config)
        self.mlp = VisionMLP(config.hidden_size, config.intermediate_size, "gelu_tanh")

    def forward(self, x: Tensor, documents: Tensor, time: Tensor) -> Tensor:
        time_BTF = self.features(time).to(x.dtype)
        modulated, gate = self.modulation1(x, time_BTF)
        x = x + gate * self.attention(modulated, documents)
        modulated, gate = self.modulation2(x, time_BTF)
        return x + gate * self.mlp(modulated)


class DiffusionOutput(nn.Module):
    """x (B,T,D) -> the sum of the squared errors of the velocity over all elements, a scalar."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.data_inputs = (
            TIME,
            GraphInput(name="target", shape=("B", "T", config.latent_size), dtype="float32", role="data"),
        )
        self.features = FourierFeatures(config.time_frequencies)
        self.scale = nn.Linear(2 * config.time_frequencies, config.hidden_size)
        self.shift = nn.Linear(2 * config.time_frequencies, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.latent_size)
        self.error = SquaredError()
        self.eps = config.layer_norm_eps

    def forward(self, x: Tensor, time: Tensor, target: Tensor) -> Tensor:
        time_BTF = self.features(time).to(x.dtype)
        normal = F.layer_norm(x, x.shape[-1:], None, None, self.eps)
        return self.error(self.output(normal * (self.scale(time_BTF) + 1.0) + self.shift(time_BTF)), target)
