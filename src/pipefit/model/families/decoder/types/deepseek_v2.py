"""DeepSeek-V2 (2024): latent attention, and experts that are selected by softmax scores, in V2 within groups and in
V2-Lite among all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, ExpertOptions
from pipefit.model.families.decoder.types.deepseek_v3 import NAMES, latent_options, read_groups, routed_options

METHODS = {"greedy": "greedy", "group_limited_greedy": "group_limited_greedy"}


def read_deepseek_v2(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a DeepSeek-V2. Raises ModelError."""
    fields = RecordedFields(config, where)
    for name, supported in (
        ("scoring_func", "softmax"), ("norm_topk_prob", False), ("rope_interleave", True), ("mlp_bias", False),
    ):  # fmt: skip
        fields.require_value(name, supported)
    options = latent_options(fields)
    del fields.record["rope_interleave"]
    experts = fields.read_count("n_routed_experts", default=64)
    method = fields.read_choice("topk_method", default="greedy", allowed=METHODS)
    groups = read_groups(fields, experts, (1, 1), best=1)
    decoder = DecoderOptions(
        **options,
        experts=ExpertOptions(
            experts=experts,
            **routed_options(fields, options["layers"], experts, first_dense=0),
            normalize=False,
            groups=groups if method == "group_limited_greedy" else None,
            weight_scale=fields.read_number("routed_scaling_factor", default=1.0),
        ),
    )
    return finish_config(fields, "DeepseekV2ForCausalLM", decoder, NAMES)


FAMILY = decoder_family("deepseek_v2", read_deepseek_v2)
