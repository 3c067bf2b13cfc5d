"""Decoder-only language models as plain layers, by options: Llama and its relatives.

Module names are those of Llama in `transformers`; the files of a model type may have other names
(`stored_names.py`). Shape suffixes: B rows, T tokens, D features, H heads, G key/value heads, K features of a head, F
features of the MLP.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from pipefit.model.families.common import AxisRotary, TokenLoss, apply_rotary, name_layer
from pipefit.model.families.decoder.attention import AlibiFeatures, make_scores
from pipefit.model.families.decoder.latent import LatentAttention
from pipefit.model.families.decoder.mlp import make_mlp
from pipefit.model.families.decoder.norms import make_norm, make_qk_norm
from pipefit.model.families.decoder.options import DecoderOptions
from pipefit.model.families.decoder.stored_names import OUTPUT_TABLE, TOKEN_TABLE, block_parameter_name
from pipefit.model.graph import TensorSpec
from pipefit.model.ops.rotary import AXES


class DecoderSource(Protocol):
    """A configuration that describes a decoder."""

    @property
    def decoder(self) -> DecoderOptions:
        """The options."""


class DecoderEmbed(nn.Module):
    """tokens (B,T) -> x (B,T,D)."""

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(options.vocab_size, options.hidden_size, options.padding)
        self.scale = options.embedding_scale
        self.embedding_norm = make_norm(options) if options.embedding_norm else nn.Identity()
        self.dropout = make_dropout(options.embedding_dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding_norm(scale_tensor(self.embed_tokens(tokens), self.scale)))


class PositionEmbed(DecoderEmbed):
    """tokens, positions (B,T) -> x (B,T,D), with a table of learned positions."""

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__(options)
        self.embed_positions = nn.Embedding(options.position_rows, options.hidden_size)
        self.offset = options.position_offset

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        places = positions + self.offset if self.offset else positions
        x_BTD = scale_tensor(self.embed_tokens(tokens), self.scale) + self.embed_positions(places)
        return self.dropout(self.embedding_norm(x_BTD))


class DecoderAttention(nn.Module):
    """Grouped-query attention with rotary positions; norms on q and k, biases and a window by options. Positions are
    (B,T), or (B,T,3) for rotary positions on three axes."""

    def __init__(self, options: DecoderOptions, layer: int) -> None:
        super().__init__()
        heads, groups, dim = options.heads, options.groups, options.head_dim
        self.q_proj = nn.Linear(options.hidden_size, heads * dim, bias=options.qkv_bias)
        self.k_proj = nn.Linear(options.hidden_size, groups * dim, bias=options.qkv_bias)
        self.v_proj = nn.Linear(options.hidden_size, groups * dim, bias=options.qkv_bias)
        self.o_proj = nn.Linear(heads * dim, options.hidden_size, bias=options.output_bias)
        self.q_norm = make_qk_norm(options, heads)
        self.k_norm = make_qk_norm(options, groups)
        self.attention = make_scores(options, layer)
        self.position_scores = AlibiFeatures(heads, options.scale) if options.alibi else None
        self.norm_first = options.qk_norm == "projection"
        self.head_dim = dim
        self.rotary = options.rotary[layer]
        self.axis_rotary = AxisRotary(self.rotary) if self.rotary is not None and options.has_axes else None

    def forward(self, x_BTD: Tensor, positions: Tensor, *ends_BT: Tensor) -> Tensor:
        q_BTHK = self._split_heads(self.q_proj(x_BTD), self.q_norm)
        k_BTGK = self._split_heads(self.k_proj(x_BTD), self.k_norm)
        v_BTGK = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.axis_rotary is not None:
            q_BTHK, k_BTGK = (self.axis_rotary(t, positions) for t in (q_BTHK, k_BTGK))
        elif self.rotary is not None:
            q_BTHK, k_BTGK = (apply_rotary(t, positions, self.rotary) for t in (q_BTHK, k_BTGK))
        if self.position_scores is not None:
            q_BTHK, k_BTGK = self.position_scores(q_BTHK, k_BTGK, positions)
        return self.o_proj(self.attention(q_BTHK, k_BTGK, v_BTGK, *ends_BT).flatten(-2))

    def _split_heads(self, projected: Tensor, norm: nn.Module) -> Tensor:
        if self.norm_first:
            return norm(projected).unflatten(-1, (-1, self.head_dim))
        return norm(projected.unflatten(-1, (-1, self.head_dim)))


class DecoderBlock(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)); both of x if the layer is parallel."""

    def __init__(self, options: DecoderOptions, layer: int) -> None:
        super().__init__()
        before, after = options.norm_places != "after", options.norm_places != "before"
        own_norm = before and not (options.parallel and options.parallel_norms == 1)
        self.input_layernorm = make_norm(options) if before else nn.Identity()
        self.self_attn = LatentAttention(options, layer) if options.latent else DecoderAttention(options, layer)
        self.post_attention_layernorm = make_norm(options) if own_norm else nn.Identity()
        self.mlp = make_mlp(options, layer)
        self.attention_output_norm = make_norm(options) if after else nn.Identity()
        self.mlp_output_norm = make_norm(options) if after else nn.Identity()
        self.dropout = make_dropout(options.residual_dropout)
        self.parallel, self.shared_norm = options.parallel, not own_norm
        self.scale = options.residual_scale

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.transform(x, positions)

    def transform(self, x: Tensor, *places: Tensor) -> Tensor:
        """Return the layer's result. `places` are the inputs of the attention beside x."""
        normed = self.input_layernorm(x)
        attended = self._finish_branch(self.self_attn(normed, *places), self.attention_output_norm)
        if self.parallel:
            inner = normed if self.shared_norm else self.post_attention_layernorm(x)
            return x + (attended + self._finish_branch(self.mlp(inner), self.mlp_output_norm))
        x = x + attended
        return x + self._finish_branch(self.mlp(self.post_attention_layernorm(x)), self.mlp_output_norm)

    def _finish_branch(self, branch: Tensor, norm: nn.Module) -> Tensor:
        return self.dropout(scale_tensor(norm(branch), self.scale))


class ImageBlock(DecoderBlock):
    """A decoder layer whose tokens of an image see all of it. image_ends (B,T): the last token that a token sees."""

    data_inputs = (TensorSpec(name="image_ends", shape=("B", "T"), dtype="int64", role="data"),)

    def forward(self, x: Tensor, positions: Tensor, image_ends: Tensor) -> Tensor:  # type: ignore[override]
        return self.transform(x, positions, image_ends)


class AxisBlock(DecoderBlock):
    """A decoder layer with rotary positions on three axes: axis_positions (B,T,3), time, row and column."""

    data_inputs = (TensorSpec(name="axis_positions", shape=("B", "T", AXES), dtype="int64", role="data"),)

    def forward(self, x: Tensor, axis_positions: Tensor) -> Tensor:  # type: ignore[override]
        return self.transform(x, axis_positions)


class StackedBlock(AxisBlock):
    """A decoder layer that adds features to its result: x (B,T,D+k D) -> (B,T,D+(k-1) D), k features of D behind the
    hidden state."""

    def __init__(self, options: DecoderOptions, layer: int) -> None:
        super().__init__(options, layer)
        self.size, self.last = options.hidden_size, layer == options.stacked - 1

    def forward(self, x: Tensor, axis_positions: Tensor) -> Tensor:  # type: ignore[override]
        size = self.size
        y_BTD = self.transform(x[..., :size], axis_positions) + x[..., size : 2 * size]
        return y_BTD if self.last else torch.cat((y_BTD, x[..., 2 * size :]), dim=-1)


class DecoderHead(nn.Module):
    """x (B,T,D) -> logits (B,T,V): the final norm and the output projection. A scale of logits is applied to x, which
    is smaller."""

    def __init__(self, options: DecoderOptions) -> None:
        super().__init__()
        self.norm = make_norm(options)
        self.lm_head = nn.Linear(options.hidden_size, options.vocab_size, bias=False)
        self.scale, self.softcap = options.logit_scale, options.logit_softcap

    def forward(self, x: Tensor) -> Tensor:
        return self.cap_logits(self.lm_head(scale_tensor(self.norm(x), self.scale)))

    def cap_logits(self, logits_BTV: Tensor) -> Tensor:
        """Return capped logits; the logits themselves without a cap."""
        return logits_BTV if not self.softcap else torch.tanh(logits_BTV / self.softcap) * self.softcap


def build(config: DecoderSource) -> list[nn.Module]:
    """Return the chain: embed, layers.0 ..., head, loss. Tied embeddings are one nn.Parameter in two layers."""
    options = config.decoder
    embed = PositionEmbed(options) if options.position_rows else DecoderEmbed(options)
    head = DecoderHead(options)
    if options.tied:
        head.lm_head.weight = embed.embed_tokens.weight
    output = TOKEN_TABLE if options.tied else OUTPUT_TABLE
    return [
        name_layer(embed, "embed", "model."),
        *(_name_block(_make_block(options, i), i) for i in range(options.layers)),
        name_layer(head, "head", "model.", {"lm_head.weight": output}),
        name_layer(TokenLoss(), "loss", ""),
    ]


def scale_tensor(x: Tensor, factor: float) -> Tensor:
    """Return x times a number, x unchanged for 1."""
    return x if factor == 1.0 else x * factor


def make_dropout(probability: float) -> nn.Module:
    """Return a dropout, or an identity for a probability of zero."""
    return nn.Dropout(probability) if probability else nn.Identity()


def _make_block(options: DecoderOptions, index: int) -> DecoderBlock:
    """Return one layer."""
    if options.has_axes:
        return StackedBlock(options, index) if index < options.stacked else AxisBlock(options, index)
    return ImageBlock(options, index) if options.sees_images else DecoderBlock(options, index)


def _name_block(block: DecoderBlock, index: int) -> nn.Module:
    """Name a layer and its parameters."""
    names = {local: block_parameter_name(index, local) for local, _ in block.named_parameters()}
    return name_layer(block, f"layers.{index}", "", names)
