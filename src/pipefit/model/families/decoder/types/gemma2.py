"""Gemma 2 (2024): Gemma with norms before and behind attention and MLP, capped scores and logits, and a sliding window
in every second layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import (
    RecordedFields,
    read_layer_types,
    read_rotary,
    usual_options,
    warn_of_dropout,
    windows_of_types,
)
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames

NAMES = StoredNames(
    modules={
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
)


def read_gemma2(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a Gemma 2. Raises ModelError."""
    fields = gemma_fields(config, where)
    options = gemma_options(fields, caps=(50.0, 30.0))
    layers = options["layers"]
    usual_types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    windows = windows_of_types(fields, read_layer_types(fields, layers, usual_types), 4096)
    decoder = DecoderOptions(**options | {"windows": windows, "rotary": read_rotary(fields, options)})
    return finish_config(fields, "Gemma2ForCausalLM", decoder, NAMES)


def gemma_fields(config: Mapping[str, Any], where: str) -> RecordedFields:
    """Return the fields of a later Gemma, with its defaults of sizes."""
    return RecordedFields(config, where)


def gemma_options(fields: RecordedFields, caps: tuple[float, float]) -> dict[str, Any]:
    """Return the options of a later Gemma but its rotary positions and windows. `caps`: defaults of the caps of scores
    and logits."""
    fields.require_value("use_bidirectional_attention", False)
    options = usual_options(fields, activation=("hidden_activation", "gelu_pytorch_tanh"))
    bias = fields.read_flag("attention_bias", default=False)
    warn_of_dropout(fields)
    return options | {
        "scale": fields.read_number("query_pre_attn_scalar", default=256.0) ** -0.5,
        "norm": NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-6), offset=1.0),
        "norm_places": "both",
        "embedding_scale": math.sqrt(options["hidden_size"]),
        "softcap": _read_cap(fields, "attn_logit_softcapping", caps[0]),
        "logit_softcap": _read_cap(fields, "final_logit_softcapping", caps[1]),
        "qkv_bias": bias,
        "output_bias": bias,
        "tied": fields.read_flag("tie_word_embeddings", default=True),
    }


def _read_cap(fields: RecordedFields, name: str, default: float) -> float:
    """Return a cap; 0 for the value null."""
    if name in fields.config and fields.config[name] is None:
        fields.record[name] = None
        return 0.0
    cap = fields.read_number(name, default=default)
    fields.record[name] = cap or None
    return cap


FAMILY = decoder_family("gemma2", read_gemma2)
