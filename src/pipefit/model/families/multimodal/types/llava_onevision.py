"""LLaVA-OneVision (Li et al., 2024): LLaVA with SigLIP and Qwen 2, and a learned vector, the newline, behind images.

Images are seen at the base resolution of the encoder, as the class sees the images of a sample that has several. The
tiles of a single large image are not made.
"""

from __future__ import annotations

import dataclasses

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.multimodal.joint_fields import JointParts
from pipefit.model.families.multimodal.joint_names import JointNames
from pipefit.model.families.multimodal.types.llava import read_llava

MODEL_TYPES = ("llava_onevision",)


def read_joint(fields: ConfigFields) -> JointParts:
    """Return the parts of a LLaVA-OneVision. Raises ModelError."""
    parts = read_llava(fields, tower_type="siglip_vision_model", text_type="qwen2", usual=(-1, "full"), end_token=True)
    tile_names = ("vision_aspect_ratio", "image_grid_pinpoints")
    tiles = {name: fields.config[name] for name in tile_names if fields.config.get(name) is not None}
    return dataclasses.replace(
        parts, fields={**parts.fields, **tiles}, names=JointNames(root_parts={"newline": "image_newline"})
    )
