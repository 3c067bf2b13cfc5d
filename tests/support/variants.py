"""Small configurations, one for every variant of every family, in the words of a Hugging Face config.json."""

from __future__ import annotations

from functools import cache
from typing import Any

from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import ModelDescription, describe_config

_SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama2": {**_SMALL, "model_type": "llama", "num_key_value_heads": 6, "rope_theta": 10000.0},
    "llama3": {**_SMALL, "model_type": "llama", "rope_theta": 500000.0, "rope_scaling": _LLAMA3},
    "llama-tied": {**_SMALL, "model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": True},
    "llama-biases": {**_SMALL, "model_type": "llama", "rope_theta": 10000.0, "attention_bias": True, "mlp_bias": True},
    "llama-linear": {
        **_SMALL,
        "model_type": "llama",
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 2.5},
    },
    "llama-yarn": {**_SMALL, "model_type": "llama", "rope_theta": 10000.0, "rope_scaling": _YARN},
    "llama-gelu": {**_SMALL, "model_type": "llama", "rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh"},
    "mistral": {**_SMALL, "model_type": "mistral", "rope_theta": 10000.0, "sliding_window": None},
    "mistral-window": {**_SMALL, "model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 5},
    "qwen2": {**_SMALL, "model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen2-window": {
        **_SMALL,
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {**_SMALL, "model_type": "qwen3", "rope_theta": 1e6, "head_dim": 16},
    "qwen3-bias": {**_SMALL, "model_type": "qwen3", "rope_theta": 1e6, "head_dim": 16, "attention_bias": True},
    "mixtral": {
        **_SMALL,
        "model_type": "mixtral",
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3-moe": {
        **_SMALL,
        "model_type": "qwen3_moe",
        "rope_theta": 1e6,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "qwen3-moe-dense": {
        **_SMALL,
        "model_type": "qwen3_moe",
        "rope_theta": 1e6,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_positions": 64,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": 0.2,
    },
    "gpt2-inverse-scale": {
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_positions": 64,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 100,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": 0.2,
        "activation_function": "gelu",
        "scale_attn_by_inverse_layer_idx": True,
    },
}


def described(name: str) -> ModelDescription:
    """A variant, by description."""
    return describe_config(VARIANTS[name], name, name)


@cache
def captured(name: str) -> Model:
    """A variant, captured; once for all tests of a session."""
    return capture_family(described(name).family, described(name).config)
