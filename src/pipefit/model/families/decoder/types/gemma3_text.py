"""The language model of Gemma 3 (2025): Gemma 2 without caps, with norms of queries and keys, five layers of six with a
sliding window, and other rotary frequencies in these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import (
    RecordedFields,
    read_layer_types,
    read_rotary,
    windows_of_types,
)
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions
from pipefit.model.families.decoder.types.gemma2 import NAMES, gemma_fields, gemma_options


def read_gemma3_text(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of the language model of a Gemma 3. Raises ModelError."""
    fields = gemma_fields(_flatten_rope(config, where), where)
    options = gemma_options(fields, caps=(0.0, 0.0))
    layers = options["layers"]
    period = fields.read_count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    usual_types = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    windows = windows_of_types(fields, read_layer_types(fields, layers, usual_types), 4096)
    rotary = read_rotary(fields, options, theta=("rope_theta", 1000000.0))
    local = {**rotary[0], "theta": fields.read_number("rope_local_base_freq", default=10000.0), "scaling": None}
    decoder = DecoderOptions(
        **options
        | {
            "windows": windows,
            "rotary": tuple(local if window else angles for window, angles in zip(windows, rotary, strict=True)),
            "qk_norm": "head",
        }
    )
    return finish_config(fields, "Gemma3ForCausalLM", decoder, NAMES)


def _flatten_rope(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a configuration of transformers 5, with rotary parameters for each kind of layer, in the fields of
    transformers 4. Raises ModelError for scaled frequencies of sliding layers."""
    parameters = config.get("rope_parameters") or {}
    if not {"full_attention", "sliding_attention"} & set(parameters):
        return config
    full, local = (dict(parameters.get(kind) or {}) for kind in ("full_attention", "sliding_attention"))
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise RecordedFields(config, where).wrong_field("rope_parameters.sliding_attention", local, "rope_type default")
    flat = {key: value for key, value in config.items() if key != "rope_parameters"}
    named = {"rope_theta": full.pop("rope_theta", None), "rope_local_base_freq": local.get("rope_theta")}
    return flat | {key: value for key, value in named.items() if value is not None} | {"rope_scaling": full or None}


FAMILY = decoder_family("gemma3_text", read_gemma3_text)
