"""Phi-3 and Phi-4: Llama with fused projections in files, and rotary positions of a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import (
    RecordedFields,
    read_rotary,
    usual_options,
    warn_of_dropout,
    windows_of_types,
)
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames, fuse_gate, fuse_projections


def read_phi3(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a Phi-3 or Phi-4. Raises ModelError."""
    fields = RecordedFields(config, where)
    options = usual_options(fields)
    window = fields.first_value("sliding_window")
    if window is not None:
        options["windows"] = windows_of_types(fields, ["sliding_attention"] * options["layers"])
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-5)),
        rotary=read_rotary(fields, options, partial=("partial_rotary_factor", 1.0)),
        residual_dropout=fields.read_number("resid_pdrop", default=0.0),
        tied=fields.read_flag("tie_word_embeddings", default=False),
    )
    fused = fuse_projections(decoder, "self_attn.qkv_proj") | fuse_gate(decoder)
    return finish_config(fields, "Phi3ForCausalLM", decoder, StoredNames(fused=fused))


FAMILY = decoder_family("phi3", read_phi3)
