"""Gemma 3 (2025) with its image encoder: SigLIP, the mean of squares of patches, an RMS norm and one projection.

Tokens of an image attend to all tokens of it, in both directions.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.decoder.options import NormOptions
from pipefit.model.families.family import WeightTensor
from pipefit.model.families.multimodal.joint_fields import JointParts, read_parts, read_text
from pipefit.model.families.multimodal.joint_names import JointNames
from pipefit.model.families.multimodal.projector import ProjectorOptions

MODEL_TYPES = ("gemma3",)

NAMES = JointNames(
    projector_parts={
        "linear_1.weight": WeightTensor("mm_input_projection_weight", transposed=True),
        "merged_norm.weight": WeightTensor("mm_soft_emb_norm.weight"),
    }
)


def read_joint(fields: ConfigFields) -> JointParts:
    """Return the parts of a Gemma 3. Raises ModelError."""
    tower, text = read_parts(fields, "siglip_vision_model", "gemma3_text")
    fields.check_fields(
        not tower.start_token,
        "The image encoder of a Gemma 3 has no start token.",
        f"vision_config, model_type {tower.model_type!r}",
        "siglip_vision_model",
    )
    fields.check_fields(
        text["model_type"] == "gemma3_text",
        "The language model of a Gemma 3 is another one.",
        f"text_config, model_type {text['model_type']!r}",
        "gemma3_text",
    )
    tied = fields.read_flag("tie_word_embeddings", default=True)
    encoder = dataclasses.replace(tower, merge=_read_merge(fields, tower.grid_side))
    language: Any = read_text(fields, text, tied)
    decoder = dataclasses.replace(language.decoder, sees_images=True)
    return JointParts(
        vision=encoder,
        language=dataclasses.replace(language, decoder=decoder),
        projector=ProjectorOptions(
            patches="mean", norm=NormOptions(eps=tower.layer_norm_eps, offset=1.0), layers=1, bias=False
        ),
        fields={"mm_tokens_per_image": (tower.grid_side // encoder.merge) ** 2, "tie_word_embeddings": tied},
        names=NAMES,
    )


def _read_merge(fields: ConfigFields, side: int) -> int:
    """Return the side of a square of patches whose mean is one token. Raises ModelError if it does not divide the
    image."""
    tokens = fields.read_count("mm_tokens_per_image", default=256)
    root = math.isqrt(tokens)
    if root * root != tokens or side % root:
        raise fields.wrong_field(
            "mm_tokens_per_image", tokens, f"the square of a number that divides the {side} patches of an image's side"
        )
    return side // root
