"""A multimodal model by configuration: an image encoder, a language model, an image generator, in this order.

Either `vision` or `generator` may be left out. Each part may be frozen; the losses have weights:

    {"model_type": "multimodal", "vision": {"model_type": "vit", ...}, "language": {"model_type": "llama", ...},
     "generator": {...}, "projector_hidden_act": "gelu", "frozen": ["vision"],
     "loss_weights": {"language": 1.0, "generator": 0.5}}

The config.json of a vision-language model of `transformers` (with a `vision_config` and a `text_config`) is read by the
file of its model type in `types/`. It may contain `frozen` and `loss_weights` as well.

Global parameter names begin with the module's: `vision.layers.0.mlp.fc1.weight`, `language.model.layers.0...`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipefit.errors import ModelError, UnsupportedModelError
from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.family import InitialValue, ModelFamily, WeightTensor
from pipefit.model.families.multimodal import diffusion_config as diffusion
from pipefit.model.families.multimodal import vision_config as vision
from pipefit.model.families.multimodal.diffusion_config import DiffusionConfig
from pipefit.model.families.multimodal.encoder_types import ACTIVATIONS, HUGGING_FACE_ACTIVATION
from pipefit.model.families.multimodal.joint_fields import JointParts, LanguageConfig, read_language
from pipefit.model.families.multimodal.joint_names import JointNames
from pipefit.model.families.multimodal.processor import complete_config
from pipefit.model.families.multimodal.projector import ProjectorOptions
from pipefit.model.families.multimodal.types import read_joint_types
from pipefit.model.families.multimodal.vision_config import VisionConfig

FREEZABLE = ("vision", "vision.encoder", "vision.projector", "language", "generator")
"Allowed entries of `frozen`: modules, and the two parts of the vision module."

SPACES = {"vision": "patches", "language": "samples", "generator": "latents"}
"The modules in the order of the chain, and the space of each module's rows."

_OWN_TYPE = "multimodal"


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalConfig:
    """The configuration of one multimodal model."""

    vision: VisionConfig | None
    language: LanguageConfig
    generator: DiffusionConfig | None
    projector: ProjectorOptions
    frozen: tuple[str, ...]
    loss_weights: Mapping[str, float]
    "Module with a loss -> the factor of its loss (per token, per element)."
    model_type: str = _OWN_TYPE
    joint_fields: Mapping[str, Any] = field(default_factory=dict)
    "Of a model type of `transformers`: the fields of its config.json beside those of its parts."
    vision_fields: Mapping[str, Any] = field(default_factory=dict)
    "Of such a model type: further fields of its `vision_config`."
    joint_names: JointNames | None = None
    "The names of its tensors in files; None: each module has the names of its own files."

    @property
    def rotary(self) -> Any:
        """The attributes of the language model's rotary operators."""
        return self.language.rotary

    def is_frozen(self, name: str) -> bool:
        """Return whether the parameter with this global name is frozen."""
        module = name.split(".", 1)[0]
        projects = name.startswith("vision.projector.") or (module == "vision" and ".stacked." in name)
        part = "vision.projector" if projects else f"{module}.encoder"
        return module in self.frozen or part in self.frozen

    def to_config(self) -> dict[str, Any]:
        ours = {"frozen": list(self.frozen), "loss_weights": dict(self.loss_weights)}
        if self.joint_names is not None and self.vision is not None:
            tower = {**self.vision.to_config(), **self.vision_fields}
            parts = {"vision_config": tower, "text_config": self.language.to_config()}
            return {"model_type": self.model_type, **self.joint_fields, **parts, **ours}
        config: dict[str, Any] = {"model_type": _OWN_TYPE}
        if self.vision is not None:
            config |= {"vision": self.vision.to_config()}
            config |= {"projector_hidden_act": HUGGING_FACE_ACTIVATION[self.projector.activation]}
            config |= {} if self.projector.encoder_norm else {"projector_norm": False}
        config["language"] = self.language.to_config()
        if self.generator is not None:
            config["generator"] = self.generator.to_config()
        return {**config, **ours}

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        if self.joint_names is not None:
            return self.joint_names.find_tensors(name, self.vision, self.language)
        module, inner = name.split(".", 1)
        if module != "language":
            return (WeightTensor(name),)
        return tuple(
            dataclasses.replace(block, name=f"language.{block.name}") for block in self.language.stored_tensors(inner)
        )

    def initial(self, name: str) -> InitialValue:
        module, inner = name.split(".", 1)
        norm = self.projector.norm
        if norm is not None and norm.offset and name == "vision.projector.merged_norm.weight":
            return InitialValue("zeros")
        part: Any = getattr(self, module)
        initial: InitialValue = part.initial(inner)
        return initial


def read(config: Mapping[str, Any], where: str) -> MultimodalConfig:
    """Return the typed configuration. Raises ModelError naming the part and the field."""
    model_type = str(config.get("model_type"))
    if model_type in JOINT_TYPES:
        return _read_joint(ConfigFields(config, where), model_type)
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
    language = read_language({"model_type": "llama", **parts["language"]}, f"{where}, language")
    encoder = None if parts["vision"] is None else vision.read(parts["vision"], f"{where}, vision")
    stacked = [] if encoder is None else list(encoder.stacked)
    fields.check_fields(
        not stacked,
        "Features of encoder layers enter the language model of a qwen3_vl only.",
        f"vision.deepstack_visual_indexes {stacked}",
        "deepstack_visual_indexes []",
    )
    return MultimodalConfig(
        vision=encoder,
        language=language,
        generator=None if parts["generator"] is None else diffusion.read(parts["generator"], f"{where}, generator"),
        projector=ProjectorOptions(
            activation=fields.read_choice("projector_hidden_act", default="gelu", allowed=ACTIVATIONS),
            encoder_norm=fields.read_flag("projector_norm", default=True),
        ),
        frozen=_frozen_modules(fields, [name for name, part in parts.items() if part is not None]),
        loss_weights=_loss_weights(fields, parts["generator"] is not None),
    )


def _read_joint(fields: ConfigFields, model_type: str) -> MultimodalConfig:
    """Return the configuration of a model type of `transformers`.

    Raises ModelError: no class of the library can take the place of a model that is refused, because a captured class
    has no modules.
    """
    try:
        parts = JOINT_TYPES[model_type](fields)
    except UnsupportedModelError as error:
        raise ModelError(
            error.what, where=error.where, seen=error.seen, allowed=error.allowed, next_step=error.next_step
        ) from None
    return MultimodalConfig(
        vision=parts.vision,
        language=parts.language,
        generator=None,
        projector=parts.projector,
        frozen=_frozen_modules(fields, ["vision", "language"]),
        loss_weights=_loss_weights(fields, generates=False),
        model_type=model_type,
        joint_fields={**parts.fields, **_special_tokens(fields)},
        vision_fields={**parts.vision_fields, **parts.vision.encoder_type.unused_parts},
        joint_names=parts.names,
    )


def _special_tokens(fields: ConfigFields) -> dict[str, Any]:
    """Return the fields that training does not read, and generation does. They are written as they were read."""
    names = (name for name in fields.config if name.endswith(("_token_id", "_token_index")) or name == "architectures")
    return {name: fields.config[name] for name in names}


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


JOINT_TYPES: Mapping[str, Callable[[ConfigFields], JointParts]] = read_joint_types()
"""The vision-language model types of `transformers`."""

FAMILY = ModelFamily(
    name="multimodal",
    model_types=(_OWN_TYPE, *JOINT_TYPES),
    read=read,
    builder="pipefit.model.families.multimodal.layers",
    parts=("vision", "language"),
    complete_config=complete_config,
)
FAMILIES = (FAMILY,)
