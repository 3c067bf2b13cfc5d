"""Granite 3 (2024): Llama with factors of embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields, read_rotary, usual_options, warn_of_dropout
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions


def read_granite(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a Granite. Raises ModelError."""
    fields = RecordedFields(config, where)
    options = usual_options(fields)
    bias = fields.read_flag("attention_bias", default=False)
    divisor = fields.read_number("logits_scaling", default=1.0)
    if not divisor:
        raise fields.wrong_field("logits_scaling", divisor, "a number above zero")
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options | {"scale": fields.read_number("attention_multiplier", default=1.0)},
        norm=NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-6)),
        rotary=read_rotary(fields, options),
        embedding_scale=fields.read_number("embedding_multiplier", default=1.0),
        residual_scale=fields.read_number("residual_multiplier", default=1.0),
        logit_scale=1.0 / divisor,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.read_flag("mlp_bias", default=False),
        tied=fields.read_flag("tie_word_embeddings", default=False),
    )
    return finish_config(fields, "GraniteForCausalLM", decoder)


FAMILY = decoder_family("granite", read_granite)
