"""GLM-4 of 2025 (`glm4`): norms before and behind attention and MLP, interleaved rotary positions of half a head,
biases of queries, keys and values, and a fused gate in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields, read_rotary, usual_options, warn_of_dropout
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames, fuse_gate


def read_glm4(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of a GLM-4. Raises ModelError."""
    fields = RecordedFields(config, where)
    options = usual_options(fields)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(eps=fields.read_number("rms_norm_eps", default=1.5625e-07)),
        rotary=read_rotary(fields, options, "interleaved", partial=("partial_rotary_factor", 0.5)),
        norm_places="both",
        qkv_bias=fields.read_flag("attention_bias", default=True),
        tied=fields.read_flag("tie_word_embeddings", default=False),
    )
    modules = {"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"}
    return finish_config(fields, "Glm4ForCausalLM", decoder, StoredNames(modules=modules, fused=fuse_gate(decoder)))


FAMILY = decoder_family("glm4", read_glm4)
