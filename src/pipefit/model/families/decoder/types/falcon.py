"""Falcon (Almazrouei et al., 2023): attention and MLP beside each other, one head of keys and values (7B) or groups
(40B, 180B, with a norm for each branch), and fused projections in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields, read_rotary, usual_options, warn_of_dropout
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames, fuse_projections

_MODULES = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def read_falcon(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a Falcon. Raises ModelError."""
    fields = RecordedFields(config, where)
    fields.require_value("alibi", False)
    fields.require_value("hidden_dropout", 0.0)
    options = _falcon_sizes(fields)
    grouped = fields.read_flag("new_decoder_architecture", default=False)
    parallel = grouped or fields.read_flag("parallel_attn", default=True)
    norms = fields.read_count("num_ln_in_parallel_attn", default=2 if grouped else 1)
    bias = fields.read_flag("bias", default=False)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(kind="layer", eps=fields.read_number("layer_norm_epsilon", default=1e-5), bias=True),
        rotary=read_rotary(fields, options),
        parallel=parallel,
        parallel_norms=norms if grouped else 1,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        gated=False,
        tied=fields.read_flag("tie_word_embeddings", default=True),
    )
    modules = dict(_MODULES)
    if parallel and decoder.parallel_norms == 2:
        modules |= {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
    fused = fuse_projections(decoder, "self_attention.query_key_value", decoder.groups)
    return finish_config(
        fields, "FalconForCausalLM", decoder, StoredNames(layers="transformer.h", modules=modules, fused=fused)
    )


def _falcon_sizes(fields: RecordedFields) -> dict[str, Any]:
    """Return the usual options. Only the architecture of 40B reads `num_kv_heads`."""
    inner = fields
    if not fields.read_flag("new_decoder_architecture", default=False):
        single = fields.read_flag("multi_query", default=True)
        groups = 1 if single else fields.read_count("num_attention_heads")
        inner = RecordedFields({**fields.config, "num_kv_heads": groups}, fields.where)
        inner.record = fields.record
    size = 4 * fields.read_count("hidden_size")
    options = usual_options(
        inner, "num_kv_heads", activation=("activation", "gelu"), mlp_size=("ffn_hidden_size", size), padded=False
    )
    del fields.record["head_dim"]
    return options


FAMILY = decoder_family("falcon", read_falcon)
