"""gpt-oss (2025): sinks of attention, a sliding window in every second layer, biases everywhere, and experts with a
clamped gate, whose files alternate gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import (
    RecordedFields,
    read_layer_types,
    read_rotary,
    read_top_k,
    usual_options,
    warn_of_dropout,
    windows_of_types,
)
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, ExpertOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_NAMES = StoredNames(modules={"mlp.gate": "mlp.router"}, stacked_experts=True)


def read_gpt_oss(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a gpt-oss. Raises ModelError."""
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_scaling": _YARN}
    fields = RecordedFields({"head_dim": 64, "num_key_value_heads": 8, **config}, where)
    fields.require_value("hidden_act", "silu")
    options = usual_options(fields)
    layers = options["layers"]
    usual_types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    options["windows"] = windows_of_types(fields, read_layer_types(fields, layers, usual_types), 128)
    bias = fields.read_flag("attention_bias", default=True)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-5)),
        rotary=read_rotary(fields, options, theta=("rope_theta", 150000.0)),
        sinks=True,
        qkv_bias=bias,
        output_bias=bias,
        experts=_read_experts(fields, layers),
        tied=fields.read_flag("tie_word_embeddings", default=False),
    )
    return finish_config(fields, "GptOssForCausalLM", decoder, _NAMES)


def _read_experts(fields: RecordedFields, layers: int) -> ExpertOptions:
    experts = fields.read_count("num_local_experts", "num_experts", default=128)
    top_k = read_top_k(fields, "num_experts_per_tok", "experts_per_token", experts=experts, default=4)
    clamp = fields.read_number("swiglu_alpha", default=1.702), fields.read_number("swiglu_limit", default=7.0)
    return ExpertOptions(
        experts=experts,
        top_k=top_k,
        size=fields.read_count("intermediate_size"),
        normalize=True,
        layers=tuple(range(layers)),
        biases=True,
        clamp=clamp,
    )


FAMILY = decoder_family("gpt_oss", read_gpt_oss)
