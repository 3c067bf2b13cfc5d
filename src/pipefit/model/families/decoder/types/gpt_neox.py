"""GPT-NeoX and Pythia (Black et al., 2022): attention and MLP beside each other with a norm each, rotary positions of a
part of each head, and queries, keys and values head by head in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import (
    RecordedFields,
    read_rotary,
    require_ungrouped,
    usual_options,
    warn_of_dropout,
)
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames, fuse_projections

_MODULES = {
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def read_gpt_neox(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a GPT-NeoX. Raises ModelError."""
    fields = RecordedFields({"hidden_act": "gelu", **config}, where)
    options = usual_options(fields, padded=False)
    require_ungrouped(fields, options, "GPT-NeoX")
    bias = fields.read_flag("attention_bias", default=True)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(kind="layer", eps=fields.read_number("layer_norm_eps", default=1e-5), bias=True),
        rotary=read_rotary(fields, options, theta=("rotary_emb_base", 10000.0), partial=("rotary_pct", 0.25)),
        parallel=fields.read_flag("use_parallel_residual", default=True),
        parallel_norms=2,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        gated=False,
        embedding_dropout=fields.read_number("hidden_dropout", default=0.0),
        residual_dropout=fields.read_number("hidden_dropout", default=0.0),
        tied=fields.read_flag("tie_word_embeddings", default=False),
    )
    fused = fuse_projections(decoder, "attention.query_key_value", decoder.groups)
    names = StoredNames(layers="gpt_neox.layers", modules=_MODULES, fused=fused)
    return finish_config(fields, "GPTNeoXForCausalLM", decoder, names)


FAMILY = decoder_family("gpt_neox", read_gpt_neox)
