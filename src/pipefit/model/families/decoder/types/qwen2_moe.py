"""Qwen 2 MoE (2024): Qwen 2 with routed experts, and a shared expert behind a gate of its own."""

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


def read_qwen2_moe(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a Qwen 2 MoE. Raises ModelError."""
    fields = RecordedFields(config, where)
    options = usual_options(fields)
    if fields.read_flag("use_sliding_window", default=False):
        last = fields.read_count("max_window_layers", default=28)
        usual_types = [
            "sliding_attention" if i % 2 == 0 and i < last else "full_attention" for i in range(options["layers"])
        ]
        options["windows"] = windows_of_types(fields, read_layer_types(fields, options["layers"], usual_types), 4096)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-6)),
        rotary=read_rotary(fields, options),
        qkv_bias=fields.read_flag("qkv_bias", default=True),
        experts=read_experts(fields, options["layers"]),
        tied=fields.read_flag("tie_word_embeddings", default=False),
    )
    return finish_config(fields, "Qwen2MoeForCausalLM", decoder)


def read_experts(fields: RecordedFields, layers: int) -> ExpertOptions:
    """Return the experts. Raises ModelError if a token selects more than there are."""
    experts = fields.read_count("num_experts", default=60)
    top_k = read_top_k(fields, "num_experts_per_tok", experts=experts, default=4)
    step = fields.read_count("decoder_sparse_step", default=1)
    dense = list(fields.first_value("mlp_only_layers", default=[]))
    return ExpertOptions(
        experts=experts,
        top_k=top_k,
        size=fields.read_count("moe_intermediate_size", default=1408),
        normalize=fields.read_flag("norm_topk_prob", default=False),
        layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
        shared_size=fields.read_count("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
    )


FAMILY = decoder_family("qwen2_moe", read_qwen2_moe)
