"""Cohere's Command R7B and Command A (2024): as Command R, with a sliding window in three layers of four. Only these
layers have rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import (
    RecordedFields,
    read_layer_types,
    read_rotary,
    usual_options,
    windows_of_types,
)
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions
from pipefit.model.families.decoder.types.cohere import parallel_options


def read_cohere2(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a Command R7B. Raises ModelError."""
    fields = RecordedFields(config, where)
    fields.require_value("use_qk_norm", False)
    options = usual_options(fields)
    period = fields.read_count("sliding_window_pattern", default=4)
    usual_types = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(options["layers"])]
    options["windows"] = windows_of_types(fields, read_layer_types(fields, options["layers"], usual_types), 4096)
    rotary = read_rotary(fields, options, "interleaved")
    decoder = DecoderOptions(
        **options,
        **parallel_options(fields),
        rotary=tuple(turn if window else None for turn, window in zip(rotary, options["windows"], strict=True)),
    )
    return finish_config(fields, "Cohere2ForCausalLM", decoder)


FAMILY = decoder_family("cohere2", read_cohere2)
