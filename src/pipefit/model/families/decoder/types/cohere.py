"""Cohere's Command R and R+ (2024): attention and MLP of one layer norm without bias, interleaved rotary positions,
and a factor of the logits. Command R+ normalises queries and keys, with weights for each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields, read_rotary, usual_options, warn_of_dropout
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions


def read_cohere(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a Command R. Raises ModelError."""
    fields = RecordedFields(config, where)
    options = usual_options(fields)
    normed = fields.read_flag("use_qk_norm", default=False)
    decoder = DecoderOptions(
        **options,
        **parallel_options(fields),
        rotary=read_rotary(fields, options, "interleaved", theta=("rope_theta", 500000.0)),
        qk_norm="each_head" if normed else "none",
    )
    return finish_config(fields, "CohereForCausalLM", decoder)


def parallel_options(fields: RecordedFields) -> dict[str, Any]:
    """Return the options that Command R and its successors have in common."""
    warn_of_dropout(fields)
    bias = fields.read_flag("attention_bias", default=False)
    return {
        "norm": NormOptions(kind="layer", eps=fields.read_number("layer_norm_eps", default=1e-5)),
        "parallel": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "logit_scale": fields.read_number("logit_scale", default=0.0625),
        "tied": fields.read_flag("tie_word_embeddings", default=True),
    }


FAMILY = decoder_family("cohere", read_cohere)
