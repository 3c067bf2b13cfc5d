"""Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025): an encoder of images of any size with rotary rows and
columns, squares of patches joined by a norm and two linear layers, and Qwen 2 with positions on three axes. Qwen2.5-VL
has windows of attention.

Qwen3-VL is refused, with the part that no option computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.errors import ModelError
from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.family import WeightTensor
from pipefit.model.families.multimodal import vision_config as vision
from pipefit.model.families.multimodal.axis_language import AxisDefaults, read_axis_text
from pipefit.model.families.multimodal.joint_fields import TEXT_DEFAULTS, JointParts
from pipefit.model.families.multimodal.joint_names import JointNames
from pipefit.model.families.multimodal.projector import ProjectorOptions
from pipefit.model.families.multimodal.types import read_joint_types

MISSING: Mapping[str, str] = {"qwen3_vl": "features of three encoder layers that enter three language layers"}
"""Model type -> what pipefit cannot compute of it."""

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", *MISSING)

NAMES = JointNames(
    vision="visual.",
    language="",
    projector="visual.merger.",
    projector_parts={
        f"linear_{ours}.{end}": WeightTensor(f"mlp.{theirs}.{end}")
        for ours, theirs in ((1, 0), (2, 2))
        for end in ("weight", "bias")
    },
    towers=(),
)

_QWEN2 = AxisDefaults(base_type="qwen2", theta=1e6, sections=(16, 24, 24))


def read_joint(fields: ConfigFields) -> JointParts:
    """Return the parts of a vision-language model of Qwen. Raises ModelError."""
    model_type = str(fields.config["model_type"])
    if model_type in MISSING:
        _refuse_type(fields, model_type)
    tower, text = (_read_part(fields, model_type, name) for name in ("vision_config", "text_config"))
    tied = fields.read_flag("tie_word_embeddings", default=False) or bool(text.get("tie_word_embeddings"))
    tower, tower_fields = (_tower_of_qwen2 if model_type == "qwen2_vl" else _tower_of_qwen25)(fields, tower)
    encoder = vision.read(tower, f"{fields.where}, vision_config")
    language = read_axis_text(fields, text, tied, _QWEN2)
    for name, width in tower_fields.items():
        fields.check_fields(
            name == "mlp_ratio" or width == language.decoder.hidden_size,
            "The encoder's results have another width than the language model.",
            f"vision_config.{name} {width}, text_config.hidden_size {language.decoder.hidden_size}",
            "equal widths",
        )
    return JointParts(
        vision=encoder,
        language=language,
        projector=ProjectorOptions(
            encoder_norm_kind="rms" if encoder.norm_kind == "rms" else "layer", keeps_width=True
        ),
        fields={"tie_word_embeddings": tied},
        vision_fields=tower_fields,
        names=NAMES,
    )


def _tower_of_qwen2(fields: ConfigFields, tower: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the encoder, and further ones: `hidden_size` is the width of its results, and the MLP has a
    ratio."""
    words = ConfigFields(tower, f"{fields.where}, vision_config")
    width, ratio = words.read_count("hidden_size", default=3584), words.read_count("mlp_ratio", default=4)
    inner = ratio * words.read_count("embed_dim", default=1280)
    return {**tower, "intermediate_size": inner}, {"hidden_size": width, "mlp_ratio": ratio}


def _tower_of_qwen25(fields: ConfigFields, tower: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the encoder, and the further one with the width of its results."""
    words = ConfigFields(tower, f"{fields.where}, vision_config")
    return dict(tower), {"out_hidden_size": words.read_count("out_hidden_size", default=3584)}


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


def _refuse_type(fields: ConfigFields, model_type: str) -> None:
    raise ModelError(
        "The vision-language model is not supported.",
        where=f"{fields.where}, model_type",
        seen=f"{model_type!r}, which has {MISSING[model_type]}",
        allowed=", ".join(sorted({*read_joint_types()} - {*MISSING})),
        next_step="plan the text model alone (model_type qwen2 or qwen3), or one of these types",
    )
