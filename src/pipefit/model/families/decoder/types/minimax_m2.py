"""MiniMax-M2 (2025): norms of all queries and all keys of a token, rotary positions of half a head, and experts that
are selected by sigmoid scores with a correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import (
    RecordedFields,
    read_rotary,
    read_top_k,
    usual_options,
    warn_of_dropout,
)
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, ExpertOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames

_NAMES = StoredNames(
    modules={
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        "mlp.experts": "block_sparse_moe.experts",
    },
    experts=("w1", "w3", "w2"),
)


def read_minimax_m2(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a MiniMax-M2. Raises ModelError."""
    if config.get("rotary_dim") is not None and config.get("head_dim"):
        config = {"partial_rotary_factor": config["rotary_dim"] / config["head_dim"], **config}
    fields = RecordedFields({"head_dim": 128, "num_key_value_heads": 8, **config}, where)
    for name, supported in (("scoring_func", "sigmoid"), ("use_qk_norm", True), ("shared_intermediate_size", 0)):
        fields.require_value(name, supported)
    options = usual_options(fields)
    layers = options["layers"]
    experts = fields.read_count("num_local_experts", default=256)
    top_k = read_top_k(fields, "num_experts_per_tok", experts=experts, default=8)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-6)),
        rotary=read_rotary(fields, options, theta=("rope_theta", 5000000.0), partial=("partial_rotary_factor", 1.0)),
        qk_norm="projection",
        experts=ExpertOptions(
            experts=experts,
            top_k=top_k,
            size=fields.read_count("intermediate_size"),
            normalize=True,
            layers=tuple(range(layers)),
            scores="sigmoid",
            correction=True,
        ),
        tied=fields.read_flag("tie_word_embeddings", default=False),
    )
    return finish_config(fields, "MiniMaxM2ForCausalLM", decoder, _NAMES)


FAMILY = decoder_family("minimax_m2", read_minimax_m2)
