"""The image encoder and its projector as plain layers. Images are packed one after the other in a row.

Inputs from the step plan: `pixels` uint8 (B,T,C*S*S), the squares of all images that one token stands for (channel,
then row, then column of the pixels; zeros for a start token); `grid` int64 (B,T,4), see `ImagePositions`; `documents`
int64 (B,T), the start in the row of a token's image. Pixels are normalised here, on the device.

A token usually stands for one patch. If the projector merges patches, it stands for a square of M = merge^2, and the
hidden state between layers is (B,T,M*D), the patches row by row. All M of a start token are copies of it, of which only
the last takes part in attention. An end token (row -2 of the grid) takes no part at all.

Shape suffixes: B rows (one), T image tokens, M patches of a token, D features, H heads, K features of a head, C
channels, P side of a patch, S = merge * P.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipefit.model.families.common import ACTIVATIONS, RMSNorm
from pipefit.model.families.decoder.norms import OffsetRMSNorm
from pipefit.model.families.decoder.options import NormOptions
from pipefit.model.families.multimodal.packed import (
    ONE_PATCH,
    GridRotary,
    ImagePositions,
    PackedAttention,
    PatchCells,
    PatchSum,
)
from pipefit.model.families.multimodal.projector import ProjectorOptions
from pipefit.model.families.multimodal.vision_config import VisionConfig
from pipefit.model.graph import TensorSpec as GraphInput

QK_NORM_EPS = 1e-6
"""The epsilon of the norms of queries and keys, which the classes of `transformers` fix."""


class PixelNormalise(nn.Module):
    """Pixels 0 to 255 -> (pixel - 255 mean) / (255 std) per channel, in the dtype of `like`. Computed in a wide dtype,
    which in a graph is float32 or wider."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        square = config.cell_side**2
        self.mean = [255 * m for m in config.image_mean for _ in range(square)]
        self.factor = [1 / (255 * s) for s in config.image_std for _ in range(square)]

    def forward(self, pixels: Tensor, like: Tensor) -> Tensor:
        x = pixels.to(torch.float64)
        if len({*self.factor}) == len({*self.mean}) == 1:
            return ((x - self.mean[0]) * self.factor[0]).to(like.dtype)
        mean, factor = (torch.tensor(v, dtype=torch.float64).to(x.device) for v in (self.mean, self.factor))
        return ((x - mean) * factor).to(like.dtype)


def make_vision_norm(kind: str, size: int, eps: float) -> nn.Module:
    """Return a norm of the kind `layer` or `rms`."""
    return RMSNorm(size, eps) if kind == "rms" else nn.LayerNorm(size, eps)


def split_patches(x_BTF: Tensor, patches: int) -> Tensor:
    """(B,T,M*D) -> (B,T,M,D); x itself if a token is one patch."""
    return x_BTF if patches == 1 else x_BTF.unflatten(-1, (patches, -1))


def join_patches(x: Tensor, patches: int) -> Tensor:
    """(B,T,M,D) -> (B,T,M*D); x itself if a token is one patch."""
    return x if patches == 1 else x.flatten(-2)


GRID = GraphInput(name="grid", shape=("B", "T", 4), dtype="int64", role="data")
"""The input of layers that read rows and columns of tokens."""


class PatchEmbed(nn.Module):
    """pixels (B,T,C*S*S) uint8 -> x (B,T,M*D): patches through a linear layer. With frames, an image is repeated as
    often, which is a convolution of a video of equal frames."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        pixels = GraphInput(name="pixels", shape=("B", "T", config.cell_features), dtype="uint8", role="data")
        self.data_inputs: tuple[GraphInput, ...] = (pixels,)
        self.normalise = PixelNormalise(config)
        self.patch = nn.Linear(config.patch_features, config.hidden_size, bias=config.encoder_type.patch_bias)
        self.patches, self.frames, self.channels = config.cell_patches, config.frames, config.num_channels
        self.square = (config.num_channels, config.merge, config.patch_size, config.merge, config.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        return join_patches(self._embed_patches(pixels), self.patches)

    def _embed_patches(self, pixels: Tensor) -> Tensor:
        x = self._cut_patches(self.normalise(pixels, self.patch.weight))
        if self.frames > 1:
            x = torch.cat([x.unflatten(-1, (self.channels, 1, -1))] * self.frames, dim=-2).flatten(-3)
        return self.patch(x)

    def _cut_patches(self, x_BTF: Tensor) -> Tensor:
        """(B,T,C*S*S) -> (B,T,M,C*P*P)."""
        if self.patches == 1:
            return x_BTF
        return x_BTF.unflatten(-1, self.square).permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(2, 3)


class VisionEmbed(PatchEmbed):
    """Patches through a linear layer, plus their learned positions; then a norm, by option."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.data_inputs = (*self.data_inputs, GRID)
        aligned = config.encoder_type.rotary
        self.positions = ImagePositions(config.grid_side, config.hidden_size, config.start_token, config.merge, aligned)
        features, eps = config.hidden_size, config.layer_norm_eps
        self.norm = nn.LayerNorm(features, eps) if config.encoder_type.input_norm else nn.Identity()

    def forward(self, pixels: Tensor, grid: Tensor) -> Tensor:  # type: ignore[override]
        return join_patches(self.norm(self.positions(self._embed_patches(pixels), grid)), self.patches)


class VisionAttention(nn.Module):
    """Multi-head attention within each image, or within windows of it; by option with rotary positions."""

    def __init__(self, features: int, heads: int, qkv_bias: bool = True, cells: PatchCells = ONE_PATCH) -> None:
        super().__init__()
        self.q_proj = nn.Linear(features, features, bias=qkv_bias)
        self.k_proj = nn.Linear(features, features, bias=qkv_bias)
        self.v_proj = nn.Linear(features, features, bias=qkv_bias)
        self.o_proj = nn.Linear(features, features)
        self.attention = PackedAttention((features // heads) ** -0.5, cells)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.rotary: nn.Module | None = None
        self.head_dim = features // heads

    def forward(self, x: Tensor, documents_BT: Tensor, *grid_BT4: Tensor) -> Tensor:
        parts = ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm), (self.v_proj, nn.Identity()))
        q, k, v = (norm(projection(x)).unflatten(-1, (-1, self.head_dim)) for projection, norm in parts)
        if self.rotary is not None:
            q, k = self.rotary(q, *grid_BT4), self.rotary(k, *grid_BT4)
        windows = grid_BT4 if self.attention.window else ()
        return self.o_proj(self.attention(q, k, v, documents_BT, *windows).flatten(-2))


class VisionMLP(nn.Module):
    """fc2(activation(fc1(x)))."""

    def __init__(self, features: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, inner)
        self.fc2 = nn.Linear(inner, features)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))


class GatedVisionMLP(VisionMLP):
    """fc2(activation(gate(x)) * fc1(x))."""

    def __init__(self, features: int, inner: int, activation: str) -> None:
        super().__init__(features, inner, activation)
        self.gate = nn.Linear(features, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(ACTIVATIONS[self.activation](self.gate(x)) * self.fc1(x))


class VisionBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); by option a learned vector multiplies each branch."""

    def __init__(self, config: VisionConfig, window: int = 0) -> None:
        super().__init__()
        features, kind, eps = config.hidden_size, config.norm_kind, config.layer_norm_eps
        self.norm1 = make_vision_norm(kind, features, eps)
        cells = PatchCells(config.cell_patches, config.unused_patches, window)
        self.attention = VisionAttention(features, config.num_attention_heads, config.qkv_bias, cells)
        if config.qk_norm:
            self.attention.q_norm, self.attention.k_norm = (RMSNorm(features, QK_NORM_EPS) for _ in range(2))
        self.norm2 = make_vision_norm(kind, features, eps)
        mlp = GatedVisionMLP if config.encoder_type.gated else VisionMLP
        self.mlp = mlp(features, config.intermediate_size, config.activation)
        scales = (nn.Parameter(torch.empty(features)) if config.layer_scale else None for _ in range(2))
        self.scale1, self.scale2 = scales
        self.patches = config.cell_patches

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        return self.transform_patches(x, documents)

    def transform_patches(self, x: Tensor, *places: Tensor) -> Tensor:
        """Return the layer's result. `places` are the inputs of the attention beside x."""
        x = split_patches(x, self.patches)
        x = x + _scale_branch(self.attention(self.norm1(x), *places), self.scale1)
        x = x + _scale_branch(self.mlp(self.norm2(x)), self.scale2)
        return join_patches(x, self.patches)


class GridBlock(VisionBlock):
    """A layer with rotary positions of patches, and windows of attention by option."""

    data_inputs = (GRID,)

    def __init__(self, config: VisionConfig, window: int = 0) -> None:
        super().__init__(config, window)
        self.attention.rotary = GridRotary(self.attention.head_dim, config.rotary_theta, config.merge)

    def forward(self, x: Tensor, documents: Tensor, grid: Tensor) -> Tensor:  # type: ignore[override]
        return self.transform_patches(x, documents, grid)


def _scale_branch(branch: Tensor, scale: Tensor | None) -> Tensor:
    return branch if scale is None else branch * scale


class VisionProjector(nn.Module):
    """x (B,T,M*D) -> (B,T,width of the language model), by the options of the projector."""

    def __init__(self, vision: VisionConfig, options: ProjectorOptions, width: int) -> None:
        super().__init__()
        features, self.patches = vision.hidden_size, vision.cell_patches
        self.has_norm = options.encoder_norm
        norm = make_vision_norm(options.encoder_norm_kind, features, vision.layer_norm_eps)
        self.norm = norm if self.has_norm else nn.Identity()
        self.sum_patches = PatchSum() if options.patches == "mean" else None
        inner = features * (1 if self.sum_patches is not None else self.patches)
        self.merged_norm = _make_merged_norm(options.norm, inner)
        middle = inner if options.keeps_width else width
        self.linear_1 = nn.Linear(inner, middle, bias=options.bias)
        self.linear_2 = nn.Linear(middle, width, bias=options.bias) if options.layers == 2 else None
        self.activation = options.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.project_tokens(x)

    def project_tokens(self, x: Tensor) -> Tensor:
        """Return the tokens of the language model."""
        if self.sum_patches is not None:
            x = self.sum_patches(self.norm(split_patches(x, self.patches))) * (1.0 / self.patches)
        elif self.has_norm:
            x = join_patches(self.norm(split_patches(x, self.patches)), self.patches)
        x = self.linear_1(self.merged_norm(x))
        return x if self.linear_2 is None else self.linear_2(ACTIVATIONS[self.activation](x))


class NewlineProjector(VisionProjector):
    """A projector that puts a learned vector in the place of the end token of an image, row -2 of the grid."""

    def __init__(self, vision: VisionConfig, options: ProjectorOptions, width: int) -> None:
        super().__init__(vision, options, width)
        self.data_inputs = (GRID,)
        self.newline = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:  # type: ignore[override]
        is_end_BT1 = torch.relu(-grid[..., :1].to(x.dtype) - 1.0)
        y_BTD = self.project_tokens(x)
        return y_BTD - y_BTD * is_end_BT1 + self.newline * is_end_BT1


class StackedProjector(VisionProjector):
    """A projector of (B,T,M*D+k*D'): k features of the language model's width D' stay behind the results."""

    def __init__(self, vision: VisionConfig, options: ProjectorOptions, width: int) -> None:
        super().__init__(vision, options, width)
        self.size = vision.hidden_size * vision.cell_patches

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.project_tokens(x[..., : self.size]), x[..., self.size :]), dim=-1)


class StackedGridBlock(GridBlock):
    """A layer with features for the language model behind the hidden state (DeepStack, Meng et al., 2024). If it is one
    of `config.stacked`, its own result goes through a projector to the language model's width, and lies behind them."""

    def __init__(self, config: VisionConfig, layer: int, width: int) -> None:
        super().__init__(config, config.layer_window(layer))
        self.size, self.first = config.hidden_size * config.cell_patches, layer == min(config.stacked)
        norm = NormOptions(eps=config.layer_norm_eps, kind="layer", bias=True)
        options = ProjectorOptions(encoder_norm=False, norm=norm, keeps_width=True)
        self.stacked = VisionProjector(config, options, width) if layer in config.stacked else None

    def forward(self, x: Tensor, documents: Tensor, grid: Tensor) -> Tensor:  # type: ignore[override]
        y = self.transform_patches(x[..., : self.size], documents, grid)
        before = () if self.first else (x[..., self.size :],)
        after = () if self.stacked is None else (self.stacked(y),)
        return torch.cat((y, *before, *after), dim=-1)


def make_embed(config: VisionConfig) -> nn.Module:
    """Return the embedding of an encoder."""
    return VisionEmbed(config) if config.grid_side else PatchEmbed(config)


def make_block(config: VisionConfig, layer: int, width: int) -> nn.Module:
    """Return a layer of an encoder. `width`: of the language model."""
    if not config.encoder_type.rotary:
        return VisionBlock(config)
    if config.stacked and layer >= min(config.stacked):
        return StackedGridBlock(config, layer, width)
    return GridBlock(config, config.layer_window(layer))


def make_projector(vision: VisionConfig, options: ProjectorOptions, width: int) -> nn.Module:
    """Return the projector of an encoder."""
    if vision.stacked:
        return StackedProjector(vision, options, width)
    return (NewlineProjector if vision.end_token else VisionProjector)(vision, options, width)


def _make_merged_norm(norm: NormOptions | None, size: int) -> nn.Module:
    if norm is None:
        return nn.Identity()
    return OffsetRMSNorm(size, norm.eps, norm.offset) if norm.offset else make_vision_norm(norm.kind, size, norm.eps)
