"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: refused, with the parts that no option computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from pipefit.errors import ModelError
from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.multimodal.types import read_joint_types

_MULTIMODAL_POSITIONS = "three rotary positions for each token of the language model"

MISSING: Mapping[str, str] = {
    "qwen2_vl": f"two rotary positions for each patch, and {_MULTIMODAL_POSITIONS}",
    "qwen2_5_vl": f"two rotary positions for each patch, attention within windows, and {_MULTIMODAL_POSITIONS}",
    "qwen3_vl": f"features of three encoder layers that enter three language layers, and {_MULTIMODAL_POSITIONS}",
}
"""Model type -> what pipefit cannot compute of it."""

MODEL_TYPES = tuple(MISSING)


def read_joint(fields: ConfigFields) -> NoReturn:
    """Raise ModelError."""
    model_type = str(fields.config["model_type"])
    raise ModelError(
        "The vision-language models of Qwen are not supported.",
        where=f"{fields.where}, model_type",
        seen=f"{model_type!r}, which has {MISSING[model_type]}",
        allowed=", ".join(sorted({*read_joint_types()} - {*MISSING})),
        next_step="plan the text model alone (model_type qwen2 or qwen3), or one of these types",
    )
