"""The image encoder of a multimodal model by configuration: a ViT or SigLIP encoder, with Hugging Face's field names.

One set of modules serves both. The model type decides whether an image begins with a start token (ViT's class token),
the activation of the MLP, and the names of weights in Hugging Face's files.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.family import InitialValue, WeightTensor

ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu"}
HUGGING_FACE_ACTIVATION = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
MODEL_TYPES = {"vit": "vit", "siglip_vision_model": "siglip_vision_model"}

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
_NAMES = {"vit": ("encoder.layer", _VIT), "siglip_vision_model": ("encoder.layers", _SIGLIP)}
"""Model type -> prefix of the layers in Hugging Face's files, and the names of an encoder's parts by pipefit's
names."""

_SIGLIP_DEFAULTS = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The configuration of one encoder. Fields have Hugging Face's names if they exist there."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    activation: str
    layer_norm_eps: float
    image_size: int
    "Side in pixels of the square images that the table of positions is for. Other sizes are interpolated."
    patch_size: int
    num_channels: int
    qkv_bias: bool
    image_mean: tuple[float, ...]
    "Mean per channel of pixels from 0 to 1."
    image_std: tuple[float, ...]
    initializer_range: float

    @property
    def start_token(self) -> bool:
        """Whether every image begins with a token that is not a patch."""
        return self.model_type == "vit"

    @property
    def grid_side(self) -> int:
        """Patches along one side of the table of positions."""
        return self.image_size // self.patch_size

    @property
    def position_count(self) -> int:
        """Rows of the table, including the start token."""
        return self.grid_side**2 + int(self.start_token)

    @property
    def patch_features(self) -> int:
        """Numbers of one patch: channels x patch x patch, in that order."""
        return self.num_channels * self.patch_size**2

    def token_count(self, height: int, width: int) -> int:
        """The number of tokens of an image of `height` x `width` pixels: its full patches and the start token, if any.
        The language model gets the same number of tokens."""
        return (height // self.patch_size) * (width // self.patch_size) + int(self.start_token)

    def to_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "hidden_act": HUGGING_FACE_ACTIVATION[self.activation],
            "layer_norm_eps": self.layer_norm_eps,
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "num_channels": self.num_channels,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "initializer_range": self.initializer_range,
        }
        return {**config, "qkv_bias": self.qkv_bias} if self.model_type == "vit" else config

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        """The tensors of Hugging Face's files that hold a parameter of the encoder, by its name within the encoder."""
        layers, names = _NAMES[self.model_type]
        front, inner = "", name
        if name.startswith("layers."):
            _, number, inner = name.split(".", 2)
            front = f"{layers}.{number}."
        if inner in names:  # stored under a separate name: the table of positions, the start token
            shapes = {"embed.positions.start": (1, 1, self.hidden_size)}
            if self.model_type == "vit":
                shapes["embed.positions.table"] = (1, self.position_count, self.hidden_size)
            return (WeightTensor(names[inner], shape=shapes.get(inner, ())),)
        part, end = inner.rsplit(".", 1)
        kernel = (self.hidden_size, self.num_channels, self.patch_size, self.patch_size)
        return (WeightTensor(f"{front}{names[part]}.{end}", shape=kernel if inner == "embed.patch.weight" else ()),)

    def initial(self, name: str) -> InitialValue:
        """The initial value of a parameter of the encoder, by its name within the encoder."""
        if name.endswith(".bias"):
            return InitialValue("zeros")
        return InitialValue("ones") if "norm" in name else InitialValue("normal", self.initializer_range)


def read(config: Mapping[str, Any], where: str) -> VisionConfig:
    """Return the typed configuration of the config.json of a ViT, a SigLIP or a SigLIP vision model. Raises
    ModelError."""
    if config.get("model_type") == "siglip":  # two towers: take the image encoder
        tower = config.get("vision_config", {})
        if not isinstance(tower, Mapping):
            raise ConfigFields(config, where).wrong_field("vision_config", tower, "a JSON object")
        config = {"model_type": "siglip_vision_model", **tower}
    if config.get("model_type") == "siglip_vision_model":  # its files omit defaults of transformers
        config = {**_SIGLIP_DEFAULTS, **config}
    fields = ConfigFields(config, where)
    model_type = fields.read_choice("model_type", default="", allowed=MODEL_TYPES)
    siglip = model_type == "siglip_vision_model"
    hidden, heads = fields.width_of_heads(("hidden_size",), ("num_attention_heads",))
    image, patch = fields.read_count("image_size", default=224), fields.read_count("patch_size", default=16)
    fields.check_fields(
        image >= patch,
        "An image is smaller than a patch.",
        f"image_size {image}, patch_size {patch}",
        "at least one patch",
    )
    for dropout in ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"):
        if fields.read_number(dropout, default=0.0) > 0:
            warnings.warn(f"{where}: {dropout} is ignored: the encoder is computed without dropout", stacklevel=2)
    channels = fields.read_count("num_channels", default=3)
    return VisionConfig(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=fields.read_count("intermediate_size", default=4 * hidden),
        num_hidden_layers=fields.read_count("num_hidden_layers"),
        num_attention_heads=heads,
        activation=fields.read_choice(
            "hidden_act", default="gelu_pytorch_tanh" if siglip else "gelu", allowed=ACTIVATIONS
        ),
        layer_norm_eps=fields.read_number("layer_norm_eps", default=1e-6 if siglip else 1e-12),
        image_size=image,
        patch_size=patch,
        num_channels=channels,
        qkv_bias=siglip or fields.read_flag("qkv_bias", default=True),
        image_mean=_per_channel(fields, "image_mean", channels),
        image_std=_per_channel(fields, "image_std", channels),
        initializer_range=fields.read_number("initializer_range", default=0.02),
    )


def _per_channel(fields: ConfigFields, name: str, channels: int) -> tuple[float, ...]:
    values = fields.first_value(name, default=[0.5] * channels)
    good = isinstance(values, (list, tuple)) and all(isinstance(v, (int, float)) and v > 0 for v in values)
    if not good or len(values) != channels:
        raise fields.wrong_field(name, values, f"{channels} numbers above zero, one a channel")
    return tuple(map(float, values))
