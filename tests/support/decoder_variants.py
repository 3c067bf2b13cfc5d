"""Small configurations of the model types in `families/decoder/types`, in the words of a Hugging Face config.json.

Tests draw tokens below 61; `test_class_defaults.py` has the padding token, whose row gets no gradient.
"""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_RMS = _SMALL | {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
_FALCON = {key: value for key, value in _SMALL.items() if key not in ("intermediate_size", "num_key_value_heads")} | {
    "model_type": "falcon",
    "alibi": False,
    "bias": False,
}
_OPT = {key: value for key, value in _SMALL.items() if key not in ("intermediate_size", "num_key_value_heads")} | {
    "model_type": "opt", "ffn_dim": 80, "init_std": 0.2, "dropout": 0.0, "word_embed_proj_dim": 48,
}  # fmt: skip
_LATENT = _RMS | {
    "num_key_value_heads": 6, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 7, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
_COHERE = _SMALL | {"layer_norm_eps": 1e-5, "hidden_act": "silu", "logit_scale": 0.25}

DECODER_VARIANTS: dict[str, dict[str, Any]] = {
    "gemma": _RMS | {"model_type": "gemma", "head_dim": 12, "hidden_act": "gelu_pytorch_tanh"},
    "phi3": _RMS | {"model_type": "phi3", "resid_pdrop": 0.0},
    "phi3-partial": _RMS | {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 5},
    "olmo2": _RMS | {"model_type": "olmo2", "rope_theta": 500000.0},
    "granite": _RMS | {
        "model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
        "logits_scaling": 2.5, "tie_word_embeddings": True,
    },
    "cohere": _COHERE | {"model_type": "cohere"},
    "cohere-normed": _COHERE | {"model_type": "cohere", "use_qk_norm": True, "tie_word_embeddings": False},
    "cohere2": _COHERE | {"model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 5},
    "glm4": _RMS | {"model_type": "glm4", "head_dim": 8, "partial_rotary_factor": 0.5},
    "starcoder2": _SMALL | {"model_type": "starcoder2", "norm_epsilon": 1e-5, "sliding_window": 6},
    "smollm3": _RMS | {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "smollm3-window": _RMS | {
        "model_type": "smollm3", "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 4,
    },
    "gpt_neox": _SMALL | {"model_type": "gpt_neox", "num_key_value_heads": 6, "rotary_pct": 0.5, "hidden_act": "gelu"},
    "gpt_neox-sequential": _SMALL | {
        "model_type": "gpt_neox", "num_key_value_heads": 6, "rotary_pct": 1.0, "hidden_act": "gelu",
        "use_parallel_residual": False,
    },
    "falcon": _FALCON | {"multi_query": True},
    "falcon-groups": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-one-norm": _FALCON | {
        "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "bias": True,
    },
    "falcon-sequential": _FALCON | {"multi_query": False, "parallel_attn": False, "bias": True},
    "opt": _OPT,
    "qwen2_moe": _RMS | {
        "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "norm_topk_prob": False, "mlp_only_layers": [0],
    },
    "gemma2": _RMS | {
        "model_type": "gemma2", "head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 5,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3_text": _RMS | {
        "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 3, "head_dim": 12,
        "query_pre_attn_scalar": 10, "sliding_window": 5, "rope_theta": 1e6, "rope_local_base_freq": 5e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gpt_oss": _RMS | {
        "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5,
        "intermediate_size": 24, "swiglu_limit": 1.5,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 16},
    },
    "deepseek_v2": _LATENT | {
        "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
        "norm_topk_prob": False, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "n_shared_experts": 2,
    },
    "deepseek_v2-lite": _LATENT | {
        "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "deepseek_v3": _LATENT | {
        "model_type": "deepseek_v3", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.9, "original_max_position_embeddings": 16,
        },
    },
    "glm4_moe": _RMS | {
        "model_type": "glm4_moe", "head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2, "use_qk_norm": True,
        "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True,
    },
    "bloom": {
        "model_type": "bloom", "vocab_size": 61, "hidden_size": 48, "n_layer": 2, "n_head": 6, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    },
    "minimax_m2": _RMS | {
        "model_type": "minimax_m2", "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 4,
        "intermediate_size": 24,
    },
}  # fmt: skip
