"""Options of a decoder-only language model. They are independent of each other, and no option names a model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""Hugging Face's names of activations -> ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormOptions:
    """The norms of hidden states."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    "Addend of the weight of an RMS norm: 1 in Gemma, whose weights are stored as differences from 1."
    bias: bool = False
    "Of layer norms."


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """Mixtures of experts in place of MLPs."""

    experts: int
    top_k: int
    size: int
    "Features of an expert."
    normalize: bool
    "Whether the weights of the selected experts are divided by their sum."
    layers: tuple[int, ...]
    "Indices of the layers that have experts."
    scores: Literal["softmax", "sigmoid"] = "softmax"
    "Function of the router's logits."
    groups: tuple[int, int, int] | None = None
    "Groups of experts, groups that a token selects, and the number of best scores whose sum is a group's."
    correction: bool = False
    "Whether a vector that is not trained is added to the scores by which experts are selected."
    biases: bool = False
    "Of the router and of both projections of the experts."
    clamp: tuple[float, float] | None = None
    "Gain and limit of a clamped gate, g sigmoid(gain g) (u + 1), in place of the activation."
    weight_scale: float = 1.0
    shared_size: int = 0
    "Features of an expert that sees every token; 0: there is none."
    shared_gate: bool = False
    "Whether the shared expert's output is multiplied by the sigmoid of a projection of x."

    @property
    def further_parameters(self) -> dict[str, str]:
        """The optional parameters: name in the operator -> name in the module."""
        names = {
            "router_bias": ("gate.bias", self.biases),
            "correction": ("gate.e_score_correction_bias", self.correction),
            "gate_up_bias": ("experts.gate_up_proj_bias", self.biases),
            "down_bias": ("experts.down_proj_bias", self.biases),
        }
        return {key: name for key, (name, present) in names.items() if present}

    def operator_attributes(self, activation: str) -> dict[str, Any]:
        """Return the attributes of the operator `moe`; defaults are absent."""
        attributes = {"experts": self.experts, "top_k": self.top_k, "normalize": self.normalize}
        optional = {
            "more": list(self.further_parameters),
            "scores": self.scores if self.scores != "softmax" else None,
            "groups": list(self.groups) if self.groups is not None else None,
            "clamp": list(self.clamp) if self.clamp is not None else None,
            "weight_scale": self.weight_scale if self.weight_scale != 1.0 else None,
        }
        return attributes | {"activation": activation} | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentOptions:
    """Latent attention: keys, values and by options queries are projected from short vectors."""

    rank: int
    "Features of the short vector of keys and values."
    query_rank: int
    "Features of the short vector of queries; 0: they are projected at once."
    plain_size: int
    "Features of a head of queries and keys without positions."
    rotary_size: int
    value_size: int
    eps: float
    "Of the norms of the short vectors."


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """One model. The defaults are Llama's."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    groups: int
    "Key/value heads."
    head_dim: int
    scale: float
    "Factor of the attention scores."
    norm: NormOptions
    mlp_size: int
    activation: str
    rotary: tuple[Mapping[str, Any] | None, ...]
    "Per layer: the attributes of the rotary operator, or None for a layer without positions."
    windows: tuple[int | None, ...]
    "Per layer: the sliding window, or None."
    softcap: float = 0.0
    "Cap of the attention scores s: softcap tanh(s / softcap); 0: none."
    logit_softcap: float = 0.0
    sinks: bool = False
    "Whether each head has the score of one more key, with the value zero, as a parameter."
    sees_images: bool = False
    "Whether tokens of an image attend to all tokens of it. The input `image_ends` names the last token that each sees."
    stacked: int = 0
    """First layers whose results get features of an image encoder, which lie behind the hidden state (DeepStack, Meng
    et al., 2024)."""
    norm_places: Literal["before", "after", "both"] = "before"
    "Norms before attention and MLP, or of their results before these are added to the residual stream."
    parallel: bool = False
    "Whether the MLP reads the layer's input, beside the attention, instead of the attention's sum."
    parallel_norms: int = 1
    "Norms of a parallel layer: one for both branches, or one for each."
    qk_norm: Literal["none", "head", "each_head", "projection"] = "none"
    """Norms of queries and keys: one over the features of a head, with equal weights for all heads or with weights for
    each, or one over all features of the projection."""
    alibi: bool = False
    "Whether scores grow with the position of the key, by a slope for each head (Press et al., 2022)."
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    "Whether the MLP is down(activation(gate(x)) * up(x)) instead of down(activation(up(x)))."
    experts: ExpertOptions | None = None
    latent: LatentOptions | None = None
    "Instead of projections to queries, keys and values."
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    residual_scale: float = 1.0
    "Factor of each branch that is added to the residual stream."
    logit_scale: float = 1.0
    position_rows: int = 0
    "Rows of a table of learned positions; 0: there is none."
    position_offset: int = 0
    "Row of position 0 in that table."
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    tied: bool = False
    "Whether the output projection is the table of tokens."
    padding: int | None = None
    "The token whose row of the table gets no gradient from the embedding."

    @property
    def has_axes(self) -> bool:
        """True if rotary positions are on three axes: time, row and column of an image."""
        return any("axes" in rotary for rotary in self.rotary if rotary is not None)
