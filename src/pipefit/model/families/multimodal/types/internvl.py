"""InternVL (Chen et al., 2024; `OpenGVLab/InternVL3-*-hf`): InternViT, whose patches are joined in squares (pixel
shuffle), a layer norm and two linear layers, and a decoder."""

from __future__ import annotations

import dataclasses

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.decoder.options import NormOptions
from pipefit.model.families.family import WeightTensor
from pipefit.model.families.multimodal.encoder_types import ACTIVATIONS
from pipefit.model.families.multimodal.joint_fields import (
    JointParts,
    read_drops_start,
    read_feature_layer,
    read_parts,
    read_text,
)
from pipefit.model.families.multimodal.joint_names import JointNames
from pipefit.model.families.multimodal.projector import ProjectorOptions
from pipefit.model.families.multimodal.types.llava import llava_fields

MODEL_TYPES = ("internvl",)

NAMES = JointNames(
    projector_parts={f"merged_norm.{end}": WeightTensor(f"layer_norm.{end}") for end in ("weight", "bias")}
)


def read_joint(fields: ConfigFields) -> JointParts:
    """Return the parts of an InternVL. Raises ModelError."""
    tower, text = read_parts(fields, "internvl_vision", "qwen2")
    tied = fields.read_flag("tie_word_embeddings", default=True)
    layers = read_feature_layer(fields, tower.num_hidden_layers, -1)
    mean_pooling = ConfigFields(fields.first_value("vision_config", default={}), fields.where).read_flag(
        "use_mean_pooling", default=True
    )
    fields.check_fields(
        read_drops_start(fields, tower, "default"),
        "An InternVL whose start token of images is one of the language model cannot join squares of patches.",
        "vision_feature_select_strategy 'full'",
        "'default'",
    )
    merge = _read_merge(fields, tower.grid_side)
    encoder = dataclasses.replace(tower, num_hidden_layers=layers, merge=merge, drops_start=True)
    activation = fields.read_choice("projector_hidden_act", default="gelu", allowed=ACTIVATIONS)
    normed = not mean_pooling and layers == tower.num_hidden_layers
    fields.check_fields(
        mean_pooling or normed,
        "An InternVL with a norm behind its encoder takes the features of the last layer.",
        f"vision_feature_layer {fields.first_value('vision_feature_layer')}, use_mean_pooling false",
        "vision_feature_layer -1",
    )
    return JointParts(
        vision=encoder,
        language=read_text(fields, text, tied),
        projector=ProjectorOptions(
            activation=activation, encoder_norm=normed, norm=NormOptions(eps=1e-5, kind="layer", bias=True)
        ),
        fields=llava_fields(encoder, activation) | {"downsample_ratio": 1 / merge, "tie_word_embeddings": tied},
        vision_fields={"use_mean_pooling": mean_pooling},
        names=NAMES,
    )


def _read_merge(fields: ConfigFields, side: int) -> int:
    """Return the side of a square of joined patches. Raises ModelError if it does not divide the image."""
    ratio = fields.read_number("downsample_ratio", default=0.5)
    merge = round(1 / ratio) if 0 < ratio <= 1 else 0
    if not merge or merge * ratio != 1 or side % merge:
        raise fields.wrong_field(
            "downsample_ratio", ratio, f"1 divided by a number that divides the {side} patches of an image's side"
        )
    return merge
