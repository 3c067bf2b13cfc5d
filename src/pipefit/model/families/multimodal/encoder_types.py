"""The types of image encoders: their defaults, the parts that they have, and the names of these in Hugging Face's
files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}
HUGGING_FACE_ACTIVATION = {ours: theirs for theirs, ours in ACTIVATIONS.items()}

_VIT = {
    "embed.patch": "embeddings.patch_embeddings.projection",
    "embed.positions.table": "embeddings.position_embeddings",
    "embed.positions.start": "embeddings.cls_token",
    "norm": "layernorm",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_SIGLIP = {
    "embed.patch": "embeddings.patch_embedding",
    "embed.positions.table": "embeddings.position_embedding.weight",
    "norm": "post_layernorm",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.out_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_CLIP = _SIGLIP | {"embed.positions.start": "embeddings.class_embedding", "embed.norm": "pre_layrnorm"}
_INTERNVL = _VIT | {
    "attention.q_proj": "attention.q_proj",
    "attention.k_proj": "attention.k_proj",
    "attention.v_proj": "attention.v_proj",
    "attention.o_proj": "attention.projection_layer",
    "attention.q_norm": "attention.q_norm",
    "attention.k_norm": "attention.k_norm",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "scale1": "lambda_1",
    "scale2": "lambda_2",
}
_QWEN = {
    "embed.patch": "patch_embed.proj",
    "norm": "merger.ln_q",
    "norm1": "norm1",
    "norm2": "norm2",
    "attention.o_proj": "attn.proj",
}
_QWEN_FIELDS = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads", "num_channels": "in_channels"}
_CLIP_COLOURS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderType:
    """One type of encoder."""

    layers: str
    "The list of layers in files."
    names: Mapping[str, str]
    "Part by pipefit's name -> its name in files, in a layer or in the encoder."
    activation: str = "gelu"
    eps: float
    "Default of the layer norms' epsilon."
    qkv_bias: tuple[str, bool] = ("", True)
    "Field with the bias of queries, keys and values ('': there is none), and its default."
    start_token: bool = False
    "Whether an image begins with a token that is not a patch."
    table_dims: int = 2
    "Dimensions of the table of positions in files; a table of three also means a start token of three."
    input_norm: bool = False
    "Whether a norm follows the embedding."
    patch_bias: bool = True
    rotary: bool = False
    "Whether rows and columns of patches are rotary positions, instead of a learned table."
    rms_norms: bool = False
    "Whether the norms of the layers are RMS norms."
    gated: bool = False
    "Whether the MLP is fc2(activation(gate(x)) * fc1(x)) instead of fc2(activation(fc1(x)))."
    fused: str = ""
    "The module of files with queries, keys and values in this order ('': each has its own)."
    stacked: str = ""
    """The list in files of projectors for layers of the language model ('': there are none). Such a type has a learned
    table of positions as well."""
    fields: Mapping[str, str] = field(default_factory=dict)
    "Field of the configuration -> its name in a config.json, if that is another one."
    layer_scale: bool = False
    "Whether each branch is multiplied by a learned vector."
    unused_parts: Mapping[str, Any] = field(default_factory=dict)
    "Fields of a written configuration without which the class has parts that a vision-language model does not use."
    sizes: Mapping[str, Any] = field(default_factory=dict)
    "Defaults of further fields, which files leave out."


_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}

ENCODER_TYPES: Mapping[str, EncoderType] = {
    "vit": EncoderType(
        layers="encoder.layer", names=_VIT, eps=1e-12, qkv_bias=("qkv_bias", True), start_token=True, table_dims=3
    ),
    "siglip_vision_model": EncoderType(
        layers="encoder.layers",
        names=_SIGLIP,
        activation="gelu_pytorch_tanh",
        eps=1e-6,
        unused_parts={"vision_use_head": False},
        sizes=_BASE,
    ),
    "clip_vision_model": EncoderType(
        layers="encoder.layers",
        names=_CLIP,
        activation="quick_gelu",
        eps=1e-5,
        start_token=True,
        input_norm=True,
        patch_bias=False,
        sizes=_BASE | {"patch_size": 32},
    ),
    "internvl_vision": EncoderType(
        layers="encoder.layer",
        names=_INTERNVL,
        eps=1e-6,
        qkv_bias=("attention_bias", False),
        start_token=True,
        table_dims=3,
        layer_scale=True,
        sizes={
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 448,
            "patch_size": 14,
        },
    ),
    "qwen2_vl_vision": EncoderType(
        layers="blocks",
        names=_QWEN | {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"},
        activation="quick_gelu",
        eps=1e-6,
        patch_bias=False,
        rotary=True,
        fused="attn.qkv",
        fields=_QWEN_FIELDS | {"hidden_size": "embed_dim"},
        sizes=_CLIP_COLOURS | {"embed_dim": 1280, "depth": 32, "num_heads": 16, "patch_size": 14},
    ),
    "qwen3_vl_vision": EncoderType(
        layers="blocks",
        names=_QWEN
        | {
            "embed.positions.table": "pos_embed.weight",
            "norm": "merger.norm",
            "mlp.fc1": "mlp.linear_fc1",
            "mlp.fc2": "mlp.linear_fc2",
            "stacked.merged_norm": "norm",
            "stacked.linear_1": "linear_fc1",
            "stacked.linear_2": "linear_fc2",
        },
        activation="gelu_pytorch_tanh",
        eps=1e-6,
        rotary=True,
        fused="attn.qkv",
        stacked="deepstack_merger_list",
        fields=_QWEN_FIELDS,
        sizes={
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "depth": 27,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "qwen2_5_vl_vision": EncoderType(
        layers="blocks",
        names=_QWEN | {"mlp.gate": "mlp.gate_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
        activation="silu",
        eps=1e-6,
        patch_bias=False,
        rotary=True,
        rms_norms=True,
        gated=True,
        fused="attn.qkv",
        fields=_QWEN_FIELDS,
        sizes=_CLIP_COLOURS
        | {
            "hidden_size": 3584,
            "intermediate_size": 3420,
            "depth": 32,
            "num_heads": 16,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
}
"""Every type of encoder by its `model_type`."""
