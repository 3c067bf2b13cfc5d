"""SmolLM 3 (2025): Llama with layers without positions, by default every fourth one."""

from __future__ import annotations

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


def read_smollm3(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a SmolLM 3. Raises ModelError."""
    fields = RecordedFields({"num_key_value_heads": 4, **config}, where)
    options = usual_options(fields)
    turns = _rotary_layers(fields, options["layers"])
    if fields.read_flag("use_sliding_window", default=False) and fields.first_value("sliding_window") is not None:
        usual_types = ["full_attention" if turned else "sliding_attention" for turned in turns]
        options["windows"] = windows_of_types(fields, read_layer_types(fields, options["layers"], usual_types))
    bias = fields.read_flag("attention_bias", default=False)
    rotary = read_rotary(fields, options, theta=("rope_theta", 2000000.0))
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-6)),
        rotary=tuple(angles if turned else None for angles, turned in zip(rotary, turns, strict=True)),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.read_flag("mlp_bias", default=False),
        tied=fields.read_flag("tie_word_embeddings", default=True),
    )
    return finish_config(fields, "SmolLM3ForCausalLM", decoder)


def _rotary_layers(fields: RecordedFields, layers: int) -> list[int]:
    """Return 1 for each layer with rotary positions, 0 for a layer without."""
    period = fields.read_count("no_rope_layer_interval", default=4)
    turns = list(fields.first_value("no_rope_layers", default=[int((i + 1) % period != 0) for i in range(layers)]))
    if len(turns) != layers or any(turned not in (0, 1) for turned in turns):
        raise fields.wrong_field(
            "no_rope_layers", turns, f"{layers} numbers, 1 for a layer with rotary positions, or 0"
        )
    return turns


FAMILY = decoder_family("smollm3", read_smollm3)
