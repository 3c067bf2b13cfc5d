"""OLMo 2 (2024): norms of the results of attention and MLP, and of all queries and all keys of a token together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.model.families.decoder.fields import RecordedFields, read_rotary, usual_options, warn_of_dropout
from pipefit.model.families.decoder.model_type import DecoderConfig, decoder_family, finish_config
from pipefit.model.families.decoder.options import DecoderOptions, NormOptions
from pipefit.model.families.decoder.stored_names import StoredNames

_NAMES = StoredNames(
    modules={"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
)


def read_olmo2(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Return the configuration of an OLMo 2. Raises ModelError."""
    fields = RecordedFields(config, where)
    options = usual_options(fields)
    bias = fields.read_flag("attention_bias", default=False)
    warn_of_dropout(fields)
    decoder = DecoderOptions(
        **options,
        norm=NormOptions(eps=fields.read_number("rms_norm_eps", default=1e-5)),
        rotary=read_rotary(fields, options),
        norm_places="after",
        qk_norm="projection",
        qkv_bias=bias,
        output_bias=bias,
        tied=fields.read_flag("tie_word_embeddings", default=False),
    )
    return finish_config(fields, "Olmo2ForCausalLM", decoder, _NAMES)


FAMILY = decoder_family("olmo2", read_olmo2)
