"""Gemma (2024): RMS norms whose weights are differences from 1, embeddings scaled by the root of the hidden size, and
a gate with GELU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields, read_rotary, usual_options, warn_of_dropout
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions


def read_gemma(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a Gemma. Raises ModelError."""
    if config.get("hidden_act") in (None, "gelu"):  # GELU means its approximation, as in transformers
        config = {**config, "hidden_act": "gelu_pytorch_tanh"}
    fields = RecordedFields(config, where)
    fields.require_value("use_bidirectional_attention", False)
    options = usual_options(fields)
    bias = fields.read_flag("attention_bias", default=False)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-6), offset=1.0),
        rotary=read_rotary(fields, options),
        embedding_scale=math.sqrt(options["hidden_size"]),
        qkv_bias=bias,
        output_bias=bias,
        tied=fields.read_flag("tie_word_embeddings", default=True),
    )
    return finish_config(fields, "GemmaForCausalLM", decoder)


FAMILY = decoder_family("gemma", read_gemma)
