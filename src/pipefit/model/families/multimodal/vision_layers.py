"""The image encoder (ViT, SigLIP) and its projector as plain layers. Images are packed one after the other in a row.

Inputs from the step plan: `pixels` uint8 (B,T,C*P*P), the patches of all images (channel, then row, then column of the
pixels; zeros for a start token); `grid` int64 (B,T,4), see `ImagePositions`; `documents` int64 (B,T), the start in the
row of a token's image. Pixels are normalised here, on the device. Shape suffixes: B rows (one), T image tokens, D
features, H heads, K features of a head, C channels, P side of a patch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipefit.model.families.common import ACTIVATIONS
from pipefit.model.families.multimodal.config import MultimodalConfig
from pipefit.model.families.multimodal.packed import ImagePositions, PackedAttention
from pipefit.model.families.multimodal.vision_config import VisionConfig
from pipefit.model.graph import TensorSpec as GraphInput


class PixelNormalise(nn.Module):
    """Pixels 0 to 255 -> (pixel - 255 mean) / (255 std) per channel, in the dtype of `like`. Computed in a wide dtype,
    which in a graph is float32 or wider."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        patch_pixels = config.patch_size**2
        self.mean = [255 * m for m in config.image_mean for _ in range(patch_pixels)]
        self.factor = [1 / (255 * s) for s in config.image_std for _ in range(patch_pixels)]

    def forward(self, pixels: Tensor, like: Tensor) -> Tensor:
        x = pixels.to(torch.float64)
        if len({*self.factor}) == len({*self.mean}) == 1:
            return ((x - self.mean[0]) * self.factor[0]).to(like.dtype)
        mean, factor = (torch.tensor(v, dtype=torch.float64).to(x.device) for v in (self.mean, self.factor))
        return ((x - mean) * factor).to(like.dtype)


class VisionEmbed(nn.Module):
    """pixels (B,T,C*P*P) uint8 -> x (B,T,D): patches through a linear layer, plus their positions."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.data_inputs = (
            GraphInput(name="pixels", shape=("B", "T", config.patch_features), dtype="uint8", role="data"),
            GraphInput(name="grid", shape=("B", "T", 4), dtype="int64", role="data"),
        )
        self.normalise = PixelNormalise(config)
        self.patch = nn.Linear(config.patch_features, config.hidden_size)
        self.positions = ImagePositions(config.grid_side, config.hidden_size, config.start_token)

    def forward(self, pixels: Tensor, grid: Tensor) -> Tensor:
        return self.positions(self.patch(self.normalise(pixels, self.patch.weight)), grid)


class VisionAttention(nn.Module):
    """Multi-head attention within each image."""

    def __init__(self, features: int, heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(features, features, bias=qkv_bias)
        self.k_proj = nn.Linear(features, features, bias=qkv_bias)
        self.v_proj = nn.Linear(features, features, bias=qkv_bias)
        self.o_proj = nn.Linear(features, features)
        self.attention = PackedAttention((features // heads) ** -0.5)
        self.head_dim = features // heads

    def forward(self, x_BTD: Tensor, documents_BT: Tensor) -> Tensor:
        q_BTHK, k_BTHK, v_BTHK = (
            layer(x_BTD).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attention(q_BTHK, k_BTHK, v_BTHK, documents_BT).flatten(-2))


class VisionMLP(nn.Module):
    """fc2(activation(fc1(x)))."""

    def __init__(self, features: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, inner)
        self.fc2 = nn.Linear(inner, features)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))


class VisionBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = VisionAttention(config.hidden_size, config.num_attention_heads, config.qkv_bias)
        self.norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = VisionMLP(config.hidden_size, config.intermediate_size, config.activation)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), documents)
        return x + self.mlp(self.norm2(x))


class VisionProjector(nn.Module):
    """The encoder's last norm (absent in LLaVA), then two linear layers per token to the width of the language
    model."""

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__()
        assert config.vision is not None
        features, width = config.vision.hidden_size, config.language.hidden_size
        self.norm = nn.LayerNorm(features, config.vision.layer_norm_eps) if config.projector_norm else nn.Identity()
        self.linear_1 = nn.Linear(features, width)
        self.linear_2 = nn.Linear(width, width)
        self.activation = config.projector_activation

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(ACTIVATIONS[self.activation](self.linear_1(self.norm(x))))
