"""The Llama family by configuration: Llama 2 and 3, Mistral, Qwen 2 and 3, and their mixtures of experts.

One set of modules serves all of them. The model type only decides defaults: biases of the projections, norms of queries
and keys, and the names of expert weights in files.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.family import InitialValue, ModelFamily, WeightTensor
from pipefit.model.ops.rotary import rotary_frequencies

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_HUGGING_FACE_ACTIVATION = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
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
        if ".mlp.experts." not in name:
            if self.model_type == "mixtral":
                name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
            return (WeightTensor(name),)
        gate, up, down = ("w1", "w3", "w2") if self.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        prefix, last = name.rsplit(".", 1)
        if self.model_type == "mixtral":
            prefix = prefix.replace(".mlp.experts", ".block_sparse_moe.experts")
        if last == "down_proj":
            return tuple(WeightTensor(f"{prefix}.{e}.{down}.weight", (e,)) for e in range(self.experts))
        size = self.expert_size
        halves = ((gate, (0, size)), (up, (size, 2 * size)))
        return tuple(
            WeightTensor(f"{prefix}.{e}.{part}.weight", (e, rows)) for e in range(self.experts) for part, rows in halves
        )

    def initial(self, name: str) -> InitialValue:
        if name.endswith("norm.weight"):
            return InitialValue("ones")
        return InitialValue("zeros") if name.endswith(".bias") else InitialValue("normal", self.initializer_range)


def read(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Return the typed configuration of a config.json of transformers 4 or 5. Raises ModelError."""
    fields = ConfigFields(config, where)
    model_type = str(config["model_type"])
    hidden, heads = fields.read_count("hidden_size"), fields.read_count("num_attention_heads")
    groups = fields.read_count("num_key_value_heads", default=heads)
    fields.check_fields(
        heads % groups == 0,
        "The attention heads are no multiple of the key/value heads.",
        f"num_attention_heads {heads}, num_key_value_heads {groups}",
        "a multiple",
    )
    if fields.first_value("head_dim") is None:
        fields.check_fields(
            hidden % heads == 0,
            "The hidden size is no multiple of the attention heads.",
            f"hidden_size {hidden}, num_attention_heads {heads}",
            "a multiple, or the field head_dim",
        )
    head_dim = fields.read_count("head_dim", default=max(1, hidden // heads))
    layers = fields.read_count("num_hidden_layers")
    theta, scaling, rotary_dim = _rope_fields(fields, head_dim)
    if fields.read_number("attention_dropout", default=0.0) > 0:
        warnings.warn(f"{where}: attention_dropout is ignored: attention is computed without dropout", stacklevel=2)
    experts, top_k, expert_size, normalize, sparse = _expert_sizes(fields, model_type, layers)
    bias = fields.read_flag("attention_bias", default=False) and model_type in ("llama", "qwen3", "qwen3_moe")
    return LlamaConfig(
        model_type=model_type,
        vocab_size=fields.read_count("vocab_size"),
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


def _rope_fields(fields: ConfigFields, head_dim: int) -> tuple[float, Mapping[str, Any] | None, int]:
    """(theta, scaling or None, rotated dimensions), from the fields of transformers 4 or 5."""
    parameters = dict(fields.first_value("rope_parameters", default={}))
    old = fields.first_value("rope_theta")
    new = parameters.pop("rope_theta", None)
    fields.check_fields(
        None in (old, new) or old == new,
        "The configuration gives two values of rope_theta.",
        f"rope_theta {old}, rope_parameters.rope_theta {new}",
        "one, or two equal ones",
    )
    theta = float(new if new is not None else old if old is not None else 10000.0)
    partial = parameters.pop("partial_rotary_factor", None) or fields.read_number("partial_rotary_factor", default=1.0)
    scaling = parameters or dict(fields.first_value("rope_scaling", default={}))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None, int(head_dim * partial)
    scaling = {"rope_type": kind, **{key: value for key, value in scaling.items() if key not in ("type", "rope_type")}}
    scaling.pop("rope_theta", None)
    if kind == "yarn" and scaling.get("original_max_position_embeddings") is None:
        scaling["original_max_position_embeddings"] = fields.read_count("max_position_embeddings")
    rotary_dim = int(head_dim * partial)
    rotary_frequencies({"theta": theta, "dim": rotary_dim, "scaling": scaling})  # raises if a field is missing
    return theta, scaling, rotary_dim


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
    top_k = fields.read_count("num_experts_per_tok", default=2 if model_type == "mixtral" else 8)
    fields.check_fields(
        top_k <= experts,
        "More experts per token than there are experts.",
        f"num_experts_per_tok {top_k}, experts {experts}",
        "at most as many",
    )
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
    name="llama", model_types=tuple(_ARCHITECTURES), read=read, builder="pipefit.model.families.llama.layers"
)
