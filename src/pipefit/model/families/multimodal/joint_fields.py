"""Fields of a vision-language model's config.json that model types share: both parts, feature layers, tied tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.decoder.options import DecoderOptions
from pipefit.model.families.family import InitialValue, WeightTensor
from pipefit.model.families.multimodal import vision_config as vision
from pipefit.model.families.multimodal.joint_names import JointNames
from pipefit.model.families.multimodal.projector import ProjectorOptions
from pipefit.model.families.multimodal.vision_config import VisionConfig


class LanguageConfig(Protocol):
    """The configuration of a decoder."""

    @property
    def decoder(self) -> DecoderOptions:
        """The options."""

    @property
    def rotary(self) -> Any:
        """The attributes of rotary operators."""

    def to_config(self) -> dict[str, Any]:
        """The fields of its config.json."""

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        """The tensors of files that hold a parameter."""

    def initial(self, name: str) -> InitialValue:
        """The initial value of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointParts:
    """The parts of a vision-language model that is one config.json of `transformers`."""

    vision: VisionConfig
    language: LanguageConfig
    projector: ProjectorOptions
    fields: Mapping[str, Any]
    "Fields of the config.json beside those of both parts."
    vision_fields: Mapping[str, Any] = field(default_factory=dict)
    "Further fields of its `vision_config`."
    names: JointNames = field(default_factory=JointNames)


_QWEN_VL_TEXT = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "max_position_embeddings": 32768,
}

TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "qwen2": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
    },
    "qwen3_vl_text": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 128000,
    },
    "qwen2_vl_text": _QWEN_VL_TEXT,
    "qwen2_5_vl_text": _QWEN_VL_TEXT,
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "vocab_size": 262208,
    },
}
"""Model type -> defaults of `transformers` for sizes that a `text_config` leaves out."""


def read_language(config: Mapping[str, Any], where: str) -> LanguageConfig:
    """Return the configuration of a language model: of any decoder without a table of positions. Raises ModelError."""
    from pipefit.model.families import FAMILIES, family_of_type

    fields = ConfigFields(config, where)
    family = family_of_type(config["model_type"])
    known = [name for entry in FAMILIES.values() if entry.graphs for name in entry.model_types]
    fields.check_fields(
        family is not None and config["model_type"] in known,
        "The type of the language model is not known.",
        repr(config["model_type"]),
        ", ".join(known),
    )
    assert family is not None
    typed: Any = family.read(config, where)
    options = getattr(typed, "decoder", None)
    fields.check_fields(
        options is not None and not options.position_rows,
        "A language model with a learned table of positions takes no images.",
        f"model_type {config['model_type']}",
        "a model type with rotary positions, such as llama or qwen2",
    )
    language: LanguageConfig = typed
    return language


def read_parts(fields: ConfigFields, tower_type: str, text_type: str) -> tuple[VisionConfig, dict[str, Any]]:
    """Return the encoder, and the fields of the language model with `transformers`' defaults. Raises ModelError."""
    tower, text = (fields.first_value(name, default={}) for name in ("vision_config", "text_config"))
    for name, part in (("vision_config", tower), ("text_config", text)):
        if not isinstance(part, Mapping):
            raise fields.wrong_field(name, part, "a configuration: an object")
    text = {"model_type": text_type, **text}
    text = {**TEXT_DEFAULTS.get(text["model_type"], {}), **text}
    return vision.read({"model_type": tower_type, **tower}, f"{fields.where}, vision_config"), text


def read_text(fields: ConfigFields, text: Mapping[str, Any], tied: bool) -> LanguageConfig:
    """Return the language model of these fields, whose output projection is its table of tokens by `tied`.

    The class takes the hidden states of the language model and has an output projection of its own, so logits are
    neither capped nor scaled. Raises ModelError for a decoder whose layers have other names in files.
    """
    where = f"{fields.where}, text_config"
    language: Any = read_language({**text, "tie_word_embeddings": tied}, where)
    (stored, *_) = language.stored_tensors("model.layers.0.self_attn.o_proj.weight")
    fields.check_fields(
        stored.name.startswith("model.layers."),
        "The files of a vision-language model have no names for the layers of this language model.",
        f"text_config, model_type {text['model_type']!r}",
        "a language model whose layers are called model.layers, such as llama, qwen2, qwen3 or gemma2",
    )
    if language.decoder.logit_softcap or language.decoder.logit_scale != 1.0:
        plain = dataclasses.replace(language.decoder, logit_softcap=0.0, logit_scale=1.0)
        language = dataclasses.replace(language, decoder=plain)
    read: LanguageConfig = language
    return read


def read_feature_layer(fields: ConfigFields, layers: int, default: int) -> int:
    """Return the number of encoder layers in front of the projector. In the file -1 is all of them, -2 all but one."""
    layer = fields.first_value("vision_feature_layer", default=default)
    if isinstance(layer, (list, tuple)) and len(layer) == 1:
        layer = layer[0]
    good = isinstance(layer, int) and not isinstance(layer, bool)
    behind = (layer if layer >= 0 else layers + 1 + layer) if good else 0
    if not 1 <= behind <= layers:
        raise fields.wrong_field(
            "vision_feature_layer", layer, f"one layer: 1 to {layers}, or -1 to -{layers} from behind"
        )
    return behind


def read_drops_start(fields: ConfigFields, encoder: VisionConfig, default: str) -> bool:
    """Return whether the start token of an image is none of the language model. Raises ModelError if the encoder has
    none."""
    strategies = {"default": "default", "full": "full"}
    drops = fields.read_choice("vision_feature_select_strategy", default=default, allowed=strategies) == "default"
    fields.check_fields(
        encoder.start_token or not drops,
        "The first token of every image is to be dropped, and this encoder gives it no start token.",
        f"vision_feature_select_strategy 'default', vision_config.model_type {encoder.model_type}",
        "'full', or an encoder with a start token (clip_vision_model, vit)",
    )
    return drops
