"""GLM-4.5 and 4.6 (2025): rotary positions of half a head, norms of queries and keys, and the experts of
DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields, read_rotary, usual_options, warn_of_dropout
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, ExpertOptions, NormOptions
from pipefit.model.families.decoder.types.deepseek_v3 import NAMES, read_groups, routed_options


def read_glm4_moe(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a GLM-4.5. Raises ModelError."""
    fields = RecordedFields(config, where)
    options = usual_options(fields)
    experts = fields.read_count("n_routed_experts", default=128)
    normed = fields.read_flag("use_qk_norm", default=False)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-5)),
        rotary=read_rotary(fields, options, partial=("partial_rotary_factor", 0.5)),
        qk_norm="head" if normed else "none",
        qkv_bias=fields.read_flag("attention_bias", default=False),
        experts=ExpertOptions(
            experts=experts,
            **routed_options(fields, options["layers"], experts, first_dense=1),
            normalize=fields.read_flag("norm_topk_prob", default=True),
            scores="sigmoid",
            groups=read_groups(fields, experts, (1, 1), best=2),
            correction=True,
            weight_scale=fields.read_number("routed_scaling_factor", default=1.0),
        ),
        tied=fields.read_flag("tie_word_embeddings", default=False),
    )
    return finish_config(fields, "Glm4MoeForCausalLM", decoder, NAMES)


FAMILY = decoder_family("glm4_moe", read_glm4_moe)
