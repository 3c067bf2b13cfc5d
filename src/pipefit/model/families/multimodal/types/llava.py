"""LLaVA (Liu et al., 2023): CLIP, SigLIP or ViT, and a projector of two linear layers. One image has one size, and one
token of the language model for each patch."""

from __future__ import annotations

import dataclasses

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.multimodal.encoder_types import ACTIVATIONS, HUGGING_FACE_ACTIVATION
from pipefit.model.families.multimodal.joint_fields import (
    JointParts,
    read_drops_start,
    read_feature_layer,
    read_parts,
    read_text,
)
from pipefit.model.families.multimodal.projector import ProjectorOptions
from pipefit.model.families.multimodal.vision_config import VisionConfig

MODEL_TYPES = ("llava",)


def read_joint(fields: ConfigFields) -> JointParts:
    """Return the parts of a LLaVA. Raises ModelError."""
    return read_llava(fields, tower_type="clip_vision_model", text_type="llama", usual=(-2, "default"))


def read_llava(
    fields: ConfigFields, *, tower_type: str, text_type: str, usual: tuple[int, str], end_token: bool = False
) -> JointParts:
    """Return the parts of LLaVA or of a model type like it. `usual`: its defaults of `vision_feature_layer` and
    `vision_feature_select_strategy`."""
    tower, text = read_parts(fields, tower_type, text_type)
    tied = fields.read_flag("tie_word_embeddings", default=False) or bool(text.get("tie_word_embeddings"))
    drops = read_drops_start(fields, tower, usual[1])
    layers = read_feature_layer(fields, tower.num_hidden_layers, usual[0])
    encoder = dataclasses.replace(tower, num_hidden_layers=layers, drops_start=drops, end_token=end_token)
    activation = fields.read_choice("projector_hidden_act", default="gelu", allowed=ACTIVATIONS)
    bias = fields.read_flag("multimodal_projector_bias", default=True)
    return JointParts(
        vision=encoder,
        language=read_text(fields, text, tied),
        projector=ProjectorOptions(activation=activation, encoder_norm=False, bias=bias),
        fields=llava_fields(encoder, activation) | {"multimodal_projector_bias": bias, "tie_word_embeddings": tied},
    )


def llava_fields(encoder: VisionConfig, activation: str) -> dict[str, object]:
    """Return the fields of a config.json that say which features of the encoder are taken. Layers behind the features
    are not part of the model, so the last one is taken."""
    return {
        "projector_hidden_act": HUGGING_FACE_ACTIVATION[activation],
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default" if encoder.drops_start else "full",
    }
