"""BLOOM (Le Scao et al., 2022): scores with slopes of positions instead of rotary positions, a norm of the embeddings,
and queries, keys and values head by head in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields, usual_options, warn_of_dropout
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames, fuse_projections

_MODULES = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.embedding_norm": "transformer.word_embeddings_layernorm",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def read_bloom(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a BLOOM. Raises ModelError."""
    fields = RecordedFields(config, where)
    fields.require_value("apply_residual_connection_post_layernorm", False)
    options = _bloom_sizes(fields)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(kind="layer", eps=fields.read_number("layer_norm_epsilon", default=1e-5), bias=True),
        rotary=(None,) * options["layers"],
        alibi=True,
        embedding_norm=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=False,
        residual_dropout=fields.read_number("hidden_dropout", default=0.0),
        tied=fields.read_flag("tie_word_embeddings", default=True),
    )
    fused = fuse_projections(decoder, "self_attention.query_key_value", decoder.groups)
    names = StoredNames(layers="transformer.h", modules=_MODULES, fused=fused)
    return finish_config(fields, "BloomForCausalLM", decoder, names)


def _bloom_sizes(fields: RecordedFields) -> dict[str, Any]:
    """Return the usual options from BLOOM's names of fields."""
    sizes = {
        "hidden_size": fields.read_count("hidden_size", "n_embed"),
        "num_hidden_layers": fields.read_count("n_layer", "num_hidden_layers"),
        "num_attention_heads": fields.read_count("n_head", "num_attention_heads"),
        "vocab_size": fields.read_count("vocab_size"),
    }
    sizes |= {"intermediate_size": 4 * sizes["hidden_size"]}
    inner = RecordedFields({**sizes, "hidden_act": "gelu_pytorch_tanh"}, fields.where)
    return usual_options(inner, padded=False)


FAMILY = decoder_family("bloom", read_bloom)
