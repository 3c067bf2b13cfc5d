"""OPT (Zhang et al., 2022): learned positions from the third row of their table, layer norms, biases, ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields, usual_options, warn_of_dropout
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames

OFFSET = 2
"""Row of position 0."""

_NAMES = StoredNames(
    layers="model.decoder.layers",
    modules={
        "model.embed_tokens": "model.decoder.embed_tokens",
        "model.embed_positions": "model.decoder.embed_positions",
        "model.norm": "model.decoder.final_layer_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    },
)


def read_opt(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of an OPT. Raises ModelError."""
    fields = RecordedFields(config, where)
    for name, supported in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
        ("layerdrop", 0.0),
        ("word_embed_proj_dim", fields.read_count("hidden_size")),
    ):
        fields.require_value(name, supported)
    options = usual_options(fields, activation=("activation_function", "relu"), mlp_size=("ffn_dim", None))
    for name in ("num_key_value_heads", "head_dim"):
        del fields.record[name]
    bias = fields.read_flag("enable_bias", default=True)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(kind="layer", eps=1e-5, bias=True),
        rotary=(None,) * options["layers"],
        position_rows=fields.read_count("max_position_embeddings", default=2048) + OFFSET,
        position_offset=OFFSET,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        gated=False,
        residual_dropout=fields.read_number("dropout", default=0.1),
        tied=fields.read_flag("tie_word_embeddings", default=True),
    )
    fields.record["init_std"] = fields.read_number("init_std", "initializer_range", default=0.02)
    return finish_config(fields, "OPTForCausalLM", decoder, _NAMES)


FAMILY = decoder_family("opt", read_opt)
