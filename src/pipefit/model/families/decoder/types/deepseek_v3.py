"""DeepSeek-V3 and R1 (2024): latent attention, and experts that are selected by sigmoid scores with a correction,
within groups, beside a shared expert."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import (
    RecordedFields,
    read_rotary,
    read_top_k,
    require_ungrouped,
    usual_options,
    warn_of_dropout,
)
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, ExpertOptions, LatentOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames

NAMES = StoredNames(
    modules={f"mlp.shared_expert.{part}_proj": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
)
"""Of experts beside a shared one."""

_LATENT_EPS = 1e-6
"""Of the norms of short vectors, whatever `rms_norm_eps` is."""


def read_deepseek_v3(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a DeepSeek-V3. Raises ModelError."""
    fields = RecordedFields(config, where)
    fields.require_value("scoring_func", "sigmoid")
    fields.require_value("topk_method", "noaux_tc")
    options = latent_options(fields)
    experts = fields.read_count("n_routed_experts", default=256)
    groups = read_groups(fields, experts, (8, 4), best=2)
    decoder = DecoderOptions(
        **options,
        experts=ExpertOptions(
            experts=experts,
            **routed_options(fields, options["layers"], experts, first_dense=3),
            normalize=fields.read_flag("norm_topk_prob", default=True),
            scores="sigmoid",
            groups=groups,
            correction=True,
            weight_scale=fields.read_number("routed_scaling_factor", default=2.5),
        ),
    )
    return finish_config(fields, "DeepseekV3ForCausalLM", decoder, NAMES)


def latent_options(fields: RecordedFields) -> dict[str, Any]:
    """Return the options of a model with latent attention, but its experts."""
    latent = LatentOptions(
        rank=fields.read_count("kv_lora_rank", default=512),
        query_rank=_read_query_rank(fields),
        plain_size=fields.read_count("qk_nope_head_dim", default=128),
        rotary_size=fields.read_count("qk_rope_head_dim", default=64),
        value_size=fields.read_count("v_head_dim", default=128),
        eps=_LATENT_EPS,
    )
    size = latent.plain_size + latent.rotary_size
    fields.check_fields(
        latent.value_size <= size,
        "Values have more features than keys.",
        f"v_head_dim {latent.value_size}, qk_nope_head_dim + qk_rope_head_dim {size}",
        "at most as many",
    )
    inner = RecordedFields({**fields.config, "head_dim": latent.rotary_size}, fields.where)
    inner.record = fields.record
    options = usual_options(inner)
    rotary = read_rotary(inner, options, "interleaved" if fields.read_flag("rope_interleave", default=True) else "half")
    del fields.record["head_dim"]
    require_ungrouped(fields, options, "Latent attention")
    bias = fields.read_flag("attention_bias", default=False)
    warn_of_dropout(fields)
    return options | {
        "head_dim": size,
        "scale": _latent_scale(size, rotary[0]["scaling"]),
        "norm": NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-6)),
        "rotary": rotary,
        "latent": latent,
        "qkv_bias": bias,
        "output_bias": bias,
        "tied": fields.read_flag("tie_word_embeddings", default=False),
    }


def routed_options(fields: RecordedFields, layers: int, experts: int, first_dense: int) -> dict[str, Any]:
    """Return the sizes and layers of experts beside a shared one. Raises ModelError if a token selects more experts
    than there are."""
    fields.require_value("moe_layer_freq", 1)
    top_k = read_top_k(fields, "num_experts_per_tok", experts=experts, default=8)
    size = fields.read_count("moe_intermediate_size", default=2048)
    dense = int(fields.read_number("first_k_dense_replace", default=first_dense))
    fields.record["first_k_dense_replace"] = dense
    return {
        "top_k": top_k,
        "size": size,
        "layers": tuple(range(dense, layers)),
        "shared_size": size * fields.read_count("n_shared_experts", default=1),
    }


def read_groups(
    fields: RecordedFields, experts: int, default: tuple[int, int], best: int
) -> tuple[int, int, int] | None:
    """Return the groups of experts, None for a single one. `best`: the number of scores whose sum is a group's.
    Raises ModelError for groups that do not divide the experts."""
    count = fields.read_count("n_group", default=default[0])
    chosen = fields.read_count("topk_group", default=default[1])
    fields.check_fields(
        experts % count == 0 and chosen <= count and (count == 1 or experts // count >= best),
        "The groups do not divide the experts, are too small, or a token selects more groups than there are.",
        f"experts {experts}, n_group {count}, topk_group {chosen}",
        f"n_group that divides the experts into groups of at least {best}, and topk_group of at most n_group",
    )
    return None if count == 1 else (count, chosen, best)


def _read_query_rank(fields: RecordedFields) -> int:
    """Return the size of the short vector of queries; 0 for the value null."""
    if "q_lora_rank" in fields.config and fields.config["q_lora_rank"] is None:
        fields.record["q_lora_rank"] = None
        return 0
    return fields.read_count("q_lora_rank", default=1536)


def _latent_scale(size: int, scaling: Mapping[str, Any] | None) -> float:
    """Return the factor of the scores, which grows with the stretch of positions (YaRN)."""
    scale, stretch = 1.0 / math.sqrt(size), scaling or {}
    factor, weight = float(stretch.get("factor", 1.0)), float(stretch.get("mscale_all_dim") or 0.0)
    if not weight or factor <= 1:
        return scale
    growth = 0.1 * weight * math.log(factor) + 1.0
    return scale * growth * growth


FAMILY = decoder_family("deepseek_v3", read_deepseek_v3)
