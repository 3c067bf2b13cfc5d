"""Tiny configurations of the causal language models of `transformers`: two layers, a hidden size of 32.

Sizes go by field names that model types share. A type whose fields differ has an entry in `BY_TYPE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS, VOCABULARY = 2, 256

_SIZES: Mapping[int, str] = {
    32: "hidden_size d_model n_embd n_hidden dim word_embed_proj_dim embedding_size input_embedding_size lru_width",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim qk_nope_head_dim rotary_dim "
    "linear_num_value_heads time_step_rank mamba_dt_rank",
    8: "head_dim d_kv kv_channels v_head_dim mamba_n_heads mamba_d_head mamba_d_state state_size ssm_state_size "
    "mamba_num_heads mamba_head_dim mamba_chunk_size chunk_size linear_key_head_dim linear_value_head_dim "
    "hidden_size_per_layer_input",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size d_ff dim_ff dff",
    64: "d_inner mamba_d_ssm max_position_embeddings n_positions max_seq_len n_ctx",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_key_value_heads "
    "num_experts_per_tok moe_topk moe_k linear_num_key_heads",
    16: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size q_lora_rank "
    "expert_ffn_hidden_size kv_lora_rank",
    1: "n_shared_experts n_group topk_group mamba_n_groups n_groups first_k_dense_replace",
    6: "sliding_window attention_window_size",
    3: "conv_L_cache",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
}  # fmt: skip
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}

_OPTIONAL = ("q_lora_rank", "sliding_window")
"""Fields that stay None where the class has None."""

BY_TYPE: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2,
                       "ffn_act_fn": {"name": "silu"}},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "use_mamba_kernels": False},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2, "intermediate_size": [48, 48],
                     "activation_sparsity_pattern": [0.5, 0.0]},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Model type -> fields that its tiny configuration has beside, or instead of, the common ones."""


def tiny_config(kind: str, dropout: bool = True) -> dict[str, Any]:
    """Return the config.json of a model type; without dropout, its rates are zero."""
    from transformers import CONFIG_MAPPING

    fields = BY_TYPE.get(kind, {})
    if "model_type" in fields:  # its defaults contradict each other
        return dict(fields)
    defaults = CONFIG_MAPPING[kind]().to_dict()
    return {"model_type": kind, **tiny_fields(kind, defaults, dropout), **fields}


def tiny_fields(kind: str, defaults: Mapping[str, Any], dropout: bool) -> dict[str, Any]:
    """Return the fields of a configuration or a part of it, from the defaults of its class."""
    from transformers import CONFIG_MAPPING

    aliases = getattr(CONFIG_MAPPING[kind], "attribute_map", {}) if kind in CONFIG_MAPPING else {}
    fields: dict[str, Any] = {name: size for name, size in _SIZE_OF.items() if name in defaults or name in aliases}
    fields = {name: size for name, size in fields.items() if aliases.get(name) not in fields}
    fields = {name: size for name, size in fields.items() if name not in _OPTIONAL or defaults.get(name) is not None}
    if "kv_lora_rank" in fields:  # latent attention
        fields.pop("head_dim", None)
        fields |= {"num_key_value_heads": 4}
    if defaults.get("layer_types"):
        kinds = list(dict.fromkeys(defaults["layer_types"]))
        fields["layer_types"] = (kinds * LAYERS)[:LAYERS]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(defaults.get(name), int) and defaults[name] >= VOCABULARY:
            fields[name] = 0
    if not dropout:
        rates = [name for name, value in defaults.items() if "drop" in name and isinstance(value, float)]
        fields |= dict.fromkeys(rates, 0.0)
    for name, part in defaults.items():
        if isinstance(part, Mapping) and "model_type" in part:
            fields[name] = {"model_type": part["model_type"], **tiny_fields(part["model_type"], part, dropout)}
    return fields
