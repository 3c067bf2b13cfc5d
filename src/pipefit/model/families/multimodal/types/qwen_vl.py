"""Qwen2-VL (Wang et al., 2024), Qwen2.5-VL and Qwen3-VL (Bai et al., 2025).

The encoder takes images of any size, with rotary rows and columns. A norm and two linear layers join squares of
patches. The language model is Qwen 2 or 3 with positions on three axes. Qwen2.5-VL has windows of attention. In
Qwen3-VL, encoder layers enter layers of the language model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.family import WeightTensor
from pipefit.model.families.multimodal import vision_config as vision
from pipefit.model.families.multimodal.axis_language import AxisDefaults, AxisLanguage, read_axis_text
from pipefit.model.families.multimodal.joint_fields import TEXT_DEFAULTS, JointParts
from pipefit.model.families.multimodal.joint_names import JointNames
from pipefit.model.families.multimodal.projector import ProjectorOptions
from pipefit.model.families.multimodal.vision_config import VisionConfig

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_QWEN2 = AxisDefaults(base_type="qwen2", theta=1e6, sections=(16, 24, 24))
_QWEN3 = AxisDefaults(base_type="qwen3", theta=5e5, sections=(24, 20, 20), interleaved=True)


def _projector_parts(first: str, second: str) -> dict[str, WeightTensor]:
    pairs = (("linear_1", first), ("linear_2", second))
    return {f"{ours}.{end}": WeightTensor(f"{theirs}.{end}") for ours, theirs in pairs for end in ("weight", "bias")}


NAMES = JointNames(
    vision="visual.",
    language="",
    projector="visual.merger.",
    projector_parts=_projector_parts("mlp.0", "mlp.2"),
    towers=(),
)
QWEN3_NAMES = JointNames(
    vision="model.visual.",
    language="",
    decoder="model.language_model.",
    projector="model.visual.merger.",
    projector_parts=_projector_parts("linear_fc1", "linear_fc2"),
    towers=(),
)


def read_joint(fields: ConfigFields) -> JointParts:
    """Return the parts of a vision-language model of Qwen. Raises ModelError."""
    model_type = str(fields.config["model_type"])
    newest = model_type == "qwen3_vl"
    tower, text = (_read_part(fields, model_type, name) for name in ("vision_config", "text_config"))
    tied = fields.read_flag("tie_word_embeddings", default=False)
    tied |= not newest and bool(text.get("tie_word_embeddings"))
    read_tower = _read_tower_of_qwen2 if model_type == "qwen2_vl" else _read_tower
    encoder, (width_name, width), more = read_tower(ConfigFields(tower, f"{fields.where}, vision_config"))
    language = read_axis_text(fields, text, tied, _QWEN3 if newest else _QWEN2)
    fields.check_fields(
        width == language.decoder.hidden_size,
        "The encoder's results have another width than the language model.",
        f"vision_config.{width_name} {width}, text_config.hidden_size {language.decoder.hidden_size}",
        "equal widths",
    )
    return JointParts(
        vision=encoder,
        language=_stack_features(fields, encoder, language),
        projector=ProjectorOptions(
            encoder_norm_kind="rms" if encoder.norm_kind == "rms" else "layer", keeps_width=True
        ),
        fields={"tie_word_embeddings": tied},
        vision_fields={width_name: width, **more},
        names=QWEN3_NAMES if newest else NAMES,
    )


_Tower = tuple[VisionConfig, tuple[str, int], Mapping[str, Any]]
"""The encoder, the field with the width of its results, and further fields."""


def _read_tower(fields: ConfigFields) -> _Tower:
    width = fields.read_count("out_hidden_size", default=3584)
    return vision.read(fields.config, fields.where), ("out_hidden_size", width), {}


def _read_tower_of_qwen2(fields: ConfigFields) -> _Tower:
    """Return an encoder whose `hidden_size` is the width of its results, and whose MLP has a ratio."""
    width, ratio = fields.read_count("hidden_size", default=3584), fields.read_count("mlp_ratio", default=4)
    inner = ratio * fields.read_count("embed_dim", default=1280)
    encoder = vision.read({**fields.config, "intermediate_size": inner}, fields.where)
    return encoder, ("hidden_size", width), {"mlp_ratio": ratio}


def _stack_features(fields: ConfigFields, encoder: VisionConfig, language: AxisLanguage) -> AxisLanguage:
    """Return the language model with features of the encoder in its first layers. Raises ModelError for too few."""
    stacked, layers = len(encoder.stacked), language.decoder.layers
    fields.check_fields(
        stacked <= layers,
        "More layers of the encoder enter the language model than it has layers.",
        f"vision_config.deepstack_visual_indexes {list(encoder.stacked)}, text_config.num_hidden_layers {layers}",
        f"at most {layers} indexes",
    )
    return dataclasses.replace(language, stacked=stacked)


def _read_part(fields: ConfigFields, model_type: str, name: str) -> dict[str, Any]:
    """Return the fields of one part, with `transformers`' defaults. Older files have those of the language model beside
    `vision_config`. Raises ModelError for a part that is no object, or of another type."""
    default = {} if name == "vision_config" else fields.config
    part = fields.first_value(name, default=default)
    if not isinstance(part, Mapping):
        raise fields.wrong_field(name, part, "a configuration: an object")
    part_type = f"{model_type}_{name.removesuffix('_config')}"
    seen = part.get("model_type", part_type)
    fields.check_fields(
        seen in (part_type, model_type),
        "A part of a Qwen-VL is of another type.",
        f"{name}, model_type {seen!r}",
        part_type,
    )
    return {**TEXT_DEFAULTS.get(part_type, {}), **part, "model_type": part_type}
