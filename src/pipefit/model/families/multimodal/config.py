"""A multimodal model by configuration: an image encoder, a language model, an image generator, in this order.

Either `vision` or `generator` may be left out. Each part may be frozen; the losses have weights:

    {"model_type": "multimodal", "vision": {"model_type": "vit", ...}, "language": {"model_type": "llama", ...},
     "generator": {...}, "projector_hidden_act": "gelu", "frozen": ["vision"],
     "loss_weights": {"language": 1.0, "generator": 0.5}}

A LLaVA's config.json (`model_type` llava, with a `vision_config` and a `text_config`) is converted if it fits: the
encoder's layers up to `vision_feature_layer`, no norm behind them, and one language-model token per token of an image.
It may contain `frozen` and `loss_weights`.

Global parameter names begin with the module's: `vision.layers.0.mlp.fc1.weight`, `language.model.layers.0...`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.family import InitialValue, ModelFamily, WeightTensor
from pipefit.model.families.llama import config as llama
from pipefit.model.families.llama.config import LlamaConfig
from pipefit.model.families.multimodal import diffusion_config as diffusion
from pipefit.model.families.multimodal import vision_config as vision
from pipefit.model.families.multimodal.diffusion_config import DiffusionConfig
from pipefit.model.families.multimodal.vision_config import ACTIVATIONS, VisionConfig

FREEZABLE = ("vision", "vision.encoder", "vision.projector", "language", "generator")
"Allowed entries of `frozen`: modules, and the two parts of the vision module."

SPACES = {"vision": "patches", "language": "samples", "generator": "latents"}
"The modules in the order of the chain, and the space of each module's rows."


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalConfig:
    """The configuration of one multimodal model."""

    vision: VisionConfig | None
    language: LlamaConfig
    generator: DiffusionConfig | None
    projector_activation: str
    projector_norm: bool
    "Whether the encoder's last norm is applied in front of the projector."
    frozen: tuple[str, ...]
    loss_weights: Mapping[str, float]
    "Module with a loss -> the factor of its loss (per token, per element)."

    @property
    def rotary(self) -> dict[str, Any]:
        """The attributes of the language model's rotary operator."""
        return self.language.rotary

    def is_frozen(self, name: str) -> bool:
        """Return whether the parameter with this global name is frozen."""
        module = name.split(".", 1)[0]
        part = "vision.projector" if name.startswith("vision.projector.") else f"{module}.encoder"
        return module in self.frozen or part in self.frozen

    def to_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"model_type": "multimodal"}
        if self.vision is not None:
            config |= {"vision": self.vision.to_config()}
            config |= {"projector_hidden_act": vision.HUGGING_FACE_ACTIVATION[self.projector_activation]}
            config |= {} if self.projector_norm else {"projector_norm": False}
        config["language"] = self.language.to_config()
        if self.generator is not None:
            config["generator"] = self.generator.to_config()
        return {**config, "frozen": list(self.frozen), "loss_weights": dict(self.loss_weights)}

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        module, inner = name.split(".", 1)
        if module != "language":
            return (WeightTensor(name),)
        return tuple(
            dataclasses.replace(block, name=f"language.{block.name}") for block in self.language.stored_tensors(inner)
        )

    def initial(self, name: str) -> InitialValue:
        module, inner = name.split(".", 1)
        part: Any = getattr(self, module)
        initial: InitialValue = part.initial(inner)
        return initial


def read(config: Mapping[str, Any], where: str) -> MultimodalConfig:
    """Return the typed configuration. Raises ModelError naming the part and the field."""
    if config.get("model_type") == "llava":
        config = _llava_config(ConfigFields(config, where))
    fields = ConfigFields(config, where)
    parts = {name: fields.first_value(name) for name in SPACES}
    for name, part in parts.items():
        if part is not None and not isinstance(part, Mapping):
            raise fields.wrong_field(name, part, "a configuration: an object")
    fields.check_fields(
        parts["language"] is not None and (parts["vision"] is not None or parts["generator"] is not None),
        "A multimodal model needs a language model, and an image encoder or an image generator.",
        ", ".join(name for name, part in parts.items() if part is not None) or "none of them",
        "`language`, and `vision` or `generator` or both",
    )
    of_language = {"model_type": "llama", **parts["language"]}
    fields.check_fields(
        of_language["model_type"] in llama.FAMILY.model_types,
        "The type of the language model is not known.",
        repr(of_language["model_type"]),
        ", ".join(llama.FAMILY.model_types),
    )
    frozen = _frozen_modules(fields, [name for name, part in parts.items() if part is not None])
    return MultimodalConfig(
        vision=None if parts["vision"] is None else vision.read(parts["vision"], f"{where}, vision"),
        language=llama.read(of_language, f"{where}, language"),
        generator=None if parts["generator"] is None else diffusion.read(parts["generator"], f"{where}, generator"),
        projector_activation=fields.read_choice("projector_hidden_act", default="gelu", allowed=ACTIVATIONS),
        projector_norm=fields.read_flag("projector_norm", default=True),
        frozen=frozen,
        loss_weights=_loss_weights(fields, parts["generator"] is not None),
    )


_LLAMA_DEFAULTS = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "vocab_size": 32000}  # fmt: skip
"""Defaults of transformers for fields that a `text_config` of type llama leaves out."""


def _llava_config(fields: ConfigFields) -> dict[str, Any]:
    """Return a LLaVA's configuration with pipefit's field names. Raises ModelError if the model does not fit this
    family."""
    tower, text = fields.first_value("vision_config", default={}), fields.first_value("text_config", default={})
    for name, part in (("vision_config", tower), ("text_config", text)):
        if not isinstance(part, Mapping):
            raise fields.wrong_field(name, part, "a configuration: an object")
    kind = tower.get("model_type", "clip_vision_model")
    fields.check_fields(
        kind in vision.MODEL_TYPES,
        "The type of this LLaVA's image encoder is not known.",
        f"vision_config, model_type {kind!r}",
        f"{', '.join(vision.MODEL_TYPES)}; CLIP has a norm in front of its layers, and its start token is dropped",
    )
    strategy, layer = (
        fields.first_value("vision_feature_select_strategy", default="default"),
        _feature_layer(fields, tower),
    )
    fields.check_fields(
        strategy == "full",
        "This LLaVA drops the first token of every image.",
        f"vision_feature_select_strategy {strategy!r}",
        "'full': every token of the encoder is one of the language model",
    )
    fields.check_fields(
        fields.read_flag("multimodal_projector_bias", default=True),
        "The projector of this LLaVA has no biases.",
        "multimodal_projector_bias false",
        "true",
    )
    language = {"model_type": "llama", **text}
    language = {**(_LLAMA_DEFAULTS if language["model_type"] == "llama" else {}), **language}
    if fields.read_flag("tie_word_embeddings", default=False):
        language["tie_word_embeddings"] = True
    ours = {name: fields.config[name] for name in ("frozen", "loss_weights") if name in fields.config}
    return {
        **ours,
        "model_type": "multimodal",
        "vision": {**tower, "num_hidden_layers": layer},
        "language": language,
        "projector_hidden_act": fields.first_value("projector_hidden_act", default="gelu"),
        "projector_norm": False,
    }


def _feature_layer(fields: ConfigFields, tower: Mapping[str, Any]) -> int:
    """The number of encoder layers in front of the projector. In the file -1 is all of them, -2 all but one."""
    layers = vision.read(tower, f"{fields.where}, vision_config").num_hidden_layers
    layer = fields.first_value("vision_feature_layer", default=-2)
    good = isinstance(layer, int) and not isinstance(layer, bool)
    behind = (layer if layer >= 0 else layers + 1 + layer) if good else 0
    if not 1 <= behind <= layers:
        raise fields.wrong_field(
            "vision_feature_layer", layer, f"one layer: 1 to {layers}, or -1 to -{layers} from behind"
        )
    return behind


def _frozen_modules(fields: ConfigFields, modules: list[str]) -> tuple[str, ...]:
    frozen = fields.first_value("frozen", default=[])
    allowed = [name for name in FREEZABLE if name.split(".")[0] in modules]
    if not isinstance(frozen, (list, tuple)) or any(name not in allowed for name in frozen):
        raise fields.wrong_field("frozen", frozen, f"a list of some of {', '.join(allowed)}")
    frozen_modules = {*frozen, *(["vision"] if {"vision.encoder", "vision.projector"} <= {*frozen} else [])}
    fields.check_fields(
        not frozen_modules.issuperset(modules),
        "Every module is frozen: there is nothing to train.",
        f"frozen {list(frozen)}",
        "leave one of them out of `frozen`",
    )
    return tuple(name for name in FREEZABLE if name in frozen)


def _loss_weights(fields: ConfigFields, generates: bool) -> dict[str, float]:
    allowed = ["language", *(["generator"] if generates else [])]
    weights = fields.first_value("loss_weights", default={})
    good = isinstance(weights, Mapping) and all(name in allowed for name in weights)
    numbers = good and all(isinstance(x, (int, float)) and not isinstance(x, bool) and x >= 0 for x in weights.values())
    if not numbers or (weights and not any(weights.get(name, 1.0) for name in allowed)):
        raise fields.wrong_field(
            "loss_weights", weights, f"{' and '.join(allowed)} -> a number, zero or more, not all zero"
        )
    return {name: float(weights.get(name, 1.0)) for name in allowed}


FAMILY = ModelFamily(
    name="multimodal",
    model_types=("multimodal", "llava"),
    read=read,
    builder="pipefit.model.families.multimodal.layers",
    parts=("vision", "language"),
)
FAMILIES = (FAMILY,)
