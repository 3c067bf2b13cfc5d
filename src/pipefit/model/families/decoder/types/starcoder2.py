"""StarCoder 2 (Lozhkov et al., 2024): layer norms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import (
    RecordedFields,
    read_rotary,
    usual_options,
    warn_of_dropout,
    windows_of_types,
)
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames

_NAMES = StoredNames(modules={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})


def read_starcoder2(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a StarCoder 2. Raises ModelError."""
    fields = RecordedFields({"hidden_act": "gelu_pytorch_tanh", **config}, where)
    options = usual_options(fields)
    if fields.first_value("sliding_window") is not None:
        options["windows"] = windows_of_types(fields, ["sliding_attention"] * options["layers"])
    bias = fields.read_flag("use_bias", default=True)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(kind="layer", eps=fields.read_number("norm_epsilon", default=1e-5), bias=True),
        rotary=read_rotary(fields, options),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        gated=False,
        embedding_dropout=fields.read_number("embedding_dropout", default=0.0),
        residual_dropout=fields.read_number("residual_dropout", default=0.0),
        tied=fields.read_flag("tie_word_embeddings", default=True),
    )
    return finish_config(fields, "Starcoder2ForCausalLM", decoder, _NAMES)


FAMILY = decoder_family("starcoder2", read_starcoder2)
