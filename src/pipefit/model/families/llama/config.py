"""The Llama family by configuration: Llama 2 and 3, Mistral, Qwen 2 and 3, and their mixtures of experts.

One set of modules serves all of them. The model type only decides defaults: biases of the projections, norms of queries
and keys, and the names of expert weights in files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.decoder.fields import read_attention_sizes, read_rope, read_top_k, warn_of_dropout
from pipefit.model.families.decoder.options import ACTIVATIONS, DecoderOptions, ExpertOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames
from pipefit.model.families.family import InitialValue, ModelFamily, WeightTensor

_HUGGING_FACE_ACTIVATION = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_STORED_NAMES = {
    "mixtral": StoredNames(
        modules={"mlp.gate": "block_sparse_moe.gate", "mlp.experts": "block_sparse_moe.experts"},
        experts=("w1", "w3", "w2"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """One model of the family. Fields have Hugging Face's names if they exist there."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    activation: str
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    rotary_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    pad_token_id: int | None
    "The token whose row of the embedding gets no gradient."
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    "Per layer: the sliding window, or None."
    experts: int
    "0 in a dense model."
    top_k: int
    expert_size: int
    normalize: bool
    "Whether the weights of the selected experts are divided by their sum."
    sparse_layers: tuple[int, ...]
    "Indices of the layers that have experts."
    initializer_range: float

    @property
    def rotary(self) -> dict[str, Any]:
        """The attributes of the rotary operator."""
        scaling = dict(self.rope_scaling) if self.rope_scaling else None
        return {"theta": self.rope_theta, "dim": self.rotary_dim, "scaling": scaling, "style": "half"}

    @property
    def decoder(self) -> DecoderOptions:
        experts = ExpertOptions(
            experts=self.experts,
            top_k=self.top_k,
            size=self.expert_size,
            normalize=self.normalize,
            layers=self.sparse_layers,
        )
        return DecoderOptions(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            groups=self.num_key_value_heads,
            head_dim=self.head_dim,
            scale=1.0 / math.sqrt(self.head_dim),
            norm=NormOptions(eps=self.rms_norm_eps),
            mlp_size=self.intermediate_size,
            activation=self.activation,
            rotary=(self.rotary,) * self.num_hidden_layers,
            windows=self.windows,
            qk_norm="head" if self.qk_norm else "none",
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            mlp_bias=self.mlp_bias,
            experts=experts if self.experts else None,
            tied=self.tie_word_embeddings,
            padding=self.pad_token_id,
        )

    def to_config(self) -> dict[str, Any]:
        sliding = next((window for window in self.windows if window), None)
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": _HUGGING_FACE_ACTIVATION[self.activation],
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": dict(self.rope_scaling) if self.rope_scaling else None,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "sliding_window": sliding,
        }
        if self.pad_token_id is not None:
            config["pad_token_id"] = self.pad_token_id
        if self.rotary_dim != self.head_dim:
            config["partial_rotary_factor"] = self.rotary_dim / self.head_dim
        if self.model_type.startswith("qwen"):
            config["use_sliding_window"] = sliding is not None
            config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in self.windows]
        if self.model_type not in ("mistral", "mixtral", "qwen2"):
            config["attention_bias"] = self.output_bias
        if self.model_type == "llama":
            config["mlp_bias"] = self.mlp_bias
        return {**config, **self._expert_fields()}

    def _expert_fields(self) -> dict[str, Any]:
        if not self.experts:
            return {}
        if self.model_type == "mixtral":
            return {"num_local_experts": self.experts, "num_experts_per_tok": self.top_k}
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_size,
            "norm_topk_prob": self.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(self.num_hidden_layers) if i not in self.sparse_layers],
        }

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        return _STORED_NAMES.get(self.model_type, StoredNames()).find_tensors(name, self.decoder)

    def initial(self, name: str) -> InitialValue:
        if name.endswith("norm.weight"):
            return InitialValue("ones")
        return InitialValue("zeros") if name.endswith(".bias") else InitialValue("normal", self.initializer_range)


def read(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Return the typed configuration of a config.json of transformers 4 or 5. Raises ModelError."""
    fields = ConfigFields(config, where)
    model_type = str(config["model_type"])
    hidden, heads, groups, head_dim = read_attention_sizes(fields)
    layers = fields.read_count("num_hidden_layers")
    default_theta = 1e6 if model_type == "mixtral" else 10000.0
    theta, scaling, rotary_dim = read_rope(fields, head_dim, theta=("rope_theta", default_theta))
    warn_of_dropout(fields)
    experts, top_k, expert_size, normalize, sparse = _expert_sizes(fields, model_type, layers)
    bias = fields.read_flag("attention_bias", default=False) and model_type in ("llama", "qwen3", "qwen3_moe")
    vocab_size = fields.read_count("vocab_size")
    return LlamaConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.read_count("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        activation=fields.read_choice("hidden_act", default="silu", allowed=ACTIVATIONS),
        rms_norm_eps=fields.read_number("rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        max_position_embeddings=fields.read_count("max_position_embeddings", default=2048),
        tie_word_embeddings=fields.read_flag("tie_word_embeddings", default=False),
        pad_token_id=fields.read_padding(vocab_size),
        qkv_bias=bias or model_type == "qwen2",
        output_bias=bias,
        mlp_bias=fields.read_flag("mlp_bias", default=False) and model_type == "llama",
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        windows=_layer_windows(fields, model_type, layers),
        experts=experts,
        top_k=top_k,
        expert_size=expert_size,
        normalize=normalize,
        sparse_layers=sparse,
        initializer_range=fields.read_number("initializer_range", default=0.02),
    )


def _layer_windows(fields: ConfigFields, model_type: str, layers: int) -> tuple[int | None, ...]:
    window = fields.first_value("sliding_window")
    qwen = model_type.startswith("qwen")
    if model_type == "llama" or window is None or (qwen and not fields.read_flag("use_sliding_window", default=False)):
        return (None,) * layers
    window = fields.read_count("sliding_window")
    types = fields.first_value("layer_types")
    if types is not None:
        fields.check_fields(
            len(types) == layers,
            "layer_types has another length than num_hidden_layers.",
            f"{len(types)} types, {layers} layers",
            "one type a layer",
        )
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if model_type in ("qwen2", "qwen3"):
        first = fields.read_count("max_window_layers", default=28)
        return tuple(window if i >= first else None for i in range(layers))
    return (window,) * layers


def _expert_sizes(fields: ConfigFields, model_type: str, layers: int) -> tuple[int, int, int, bool, tuple[int, ...]]:
    """(experts, top_k, features of an expert, normalize, sparse layers); zeros in a dense model."""
    if model_type not in ("mixtral", "qwen3_moe"):
        return 0, 0, 0, False, ()
    experts = fields.read_count("num_local_experts", "num_experts", default=8 if model_type == "mixtral" else 128)
    top_k = read_top_k(fields, "num_experts_per_tok", experts=experts, default=2 if model_type == "mixtral" else 8)
    if model_type == "mixtral":
        return experts, top_k, fields.read_count("intermediate_size"), True, tuple(range(layers))
    step, dense = (
        fields.read_count("decoder_sparse_step", default=1),
        set(fields.first_value("mlp_only_layers", default=())),
    )
    sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    size = fields.read_count("moe_intermediate_size")
    return experts, top_k, size, fields.read_flag("norm_topk_prob", default=False), sparse


FAMILY = ModelFamily(
    name="llama",
    model_types=tuple(_ARCHITECTURES),
    read=read,
    builder="pipefit.model.families.decoder.layers",
    graphs="pipefit.model.families.decoder.graphs",
)
FAMILIES = (FAMILY,)
