"""The image encoder of a multimodal model by configuration, with Hugging Face's field names.

One set of modules serves all encoders. The model type decides the parts that one has (`encoder_types.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.errors import UnsupportedModelError
from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.family import InitialValue, RowParts, WeightTensor
from pipefit.model.families.multimodal.encoder_types import (
    ACTIVATIONS,
    ENCODER_TYPES,
    HUGGING_FACE_ACTIVATION,
    EncoderType,
)

_PROJECTIONS = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


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
    """Side in pixels of the square images that the table of positions is for. Other sizes are interpolated. 0: there is
    no table, and images have any size."""
    patch_size: int
    num_channels: int
    qkv_bias: bool
    image_mean: tuple[float, ...]
    "Mean per channel of pixels from 0 to 1."
    image_std: tuple[float, ...]
    initializer_range: float
    norm_kind: str = "layer"
    "Norms of the layers: `layer` or `rms`."
    qk_norm: bool = False
    "Whether RMS norms follow the projections to queries and keys."
    layer_scale: float = 0.0
    "First value of the vectors that multiply each branch; 0: there are none."
    merge: int = 1
    "Side in patches of the square that one token of the language model stands for."
    drops_start: bool = False
    "Whether the start token of an image is none of the language model."
    end_token: bool = False
    "Whether every image ends with a token that only the language model has: a learned vector (LLaVA's newline)."
    rotary_theta: float = 0.0
    "Base of the rotary frequencies of rows and columns; 0: there are none."
    frames: int = 1
    "Frames of a video that the embedding joins. An image is repeated as often."
    window: int = 0
    "Side in tokens of the windows of attention; 0: patches see their entire image."
    full_layers: tuple[int, ...] = ()
    "Indices of the layers without windows."
    stacked: tuple[int, ...] = ()
    "Indices of the layers whose results also enter the first layers of the language model, one each."

    @property
    def encoder_type(self) -> EncoderType:
        """The facts of the model type."""
        return ENCODER_TYPES[self.model_type]

    @property
    def start_token(self) -> bool:
        """Whether every image begins with a token that is not a patch."""
        return self.encoder_type.start_token

    @property
    def grid_side(self) -> int:
        """Patches along one side of the table of positions."""
        return self.image_size // self.patch_size

    @property
    def position_count(self) -> int:
        """Rows of the table, including the start token."""
        return self.grid_side**2 + int(self.start_token)

    @property
    def cell_side(self) -> int:
        """Side in pixels of the square that one token stands for."""
        return self.merge * self.patch_size

    @property
    def cell_patches(self) -> int:
        """Patches of one token."""
        return self.merge**2

    @property
    def patch_features(self) -> int:
        """Numbers of one patch: channels x frames x patch x patch, in that order."""
        return self.num_channels * self.frames * self.patch_size**2

    @property
    def cell_features(self) -> int:
        """Numbers of one token: channels x side x side, in that order."""
        return self.num_channels * self.cell_side**2

    def token_count(self, height: int, width: int) -> int:
        """The number of tokens of an image of `height` x `width` pixels: its full squares of patches, and the start and
        end tokens, if any. The language model gets the same number of tokens, or one less (`drops_start`)."""
        squares = (height // self.cell_side) * (width // self.cell_side)
        return squares + int(self.start_token) + int(self.end_token)

    @property
    def unused_patches(self) -> tuple[int, int]:
        """The first and the last patches of the tokens of an image that take no part in attention."""
        return self.cell_patches - 1 if self.start_token else 0, self.cell_patches if self.end_token else 0

    def layer_window(self, layer: int) -> int:
        """Return the side in tokens of a layer's windows; 0: it has none."""
        return 0 if layer in self.full_layers else self.window

    def to_config(self) -> dict[str, Any]:
        config = self._usual_config()
        if not self.encoder_type.rotary:
            return config
        del config["layer_norm_eps"], config["image_size"]
        config |= {
            "spatial_merge_size": self.merge,
            "temporal_patch_size": self.frames,
            "rope_parameters": {"rope_type": "axial", "rope_theta": self.rotary_theta},
        }
        if self.grid_side:
            config |= {"num_position_embeddings": self.position_count, "deepstack_visual_indexes": list(self.stacked)}
        if self.window:
            config |= {"window_size": self.window * self.cell_side, "fullatt_block_indexes": list(self.full_layers)}
        return {self.encoder_type.fields.get(name, name): value for name, value in config.items()}

    def _usual_config(self) -> dict[str, Any]:
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
        bias = self.encoder_type.qkv_bias[0]
        if bias:
            config[bias] = self.qkv_bias
        if self.layer_scale:
            config |= {"norm_type": f"{self.norm_kind}_norm", "use_qk_norm": self.qk_norm}
            config["layer_scale_init_value"] = self.layer_scale
        return config

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        """The tensors of Hugging Face's files that hold a parameter of the encoder, by its name within the encoder."""
        kind = self.encoder_type
        front, number, inner = "", "", name
        if name.startswith("layers."):
            _, number, inner = name.split(".", 2)
            front = f"{kind.layers}.{number}."
        if inner in kind.names:  # a parameter without a module of its own: positions, the start token, scales
            shapes: dict[str, tuple[int, ...]] = {}
            if kind.table_dims == 3:
                shapes["embed.positions.table"] = (1, self.position_count, self.hidden_size)
                shapes["embed.positions.start"] = (1, 1, self.hidden_size)
            return (WeightTensor(front + kind.names[inner], shape=shapes.get(inner, ())),)
        part, end = inner.rsplit(".", 1)
        if part.startswith("stacked."):
            index = self.stacked.index(int(number))
            return (WeightTensor(f"{kind.stacked}.{index}.{kind.names[part]}.{end}"),)
        if kind.fused and part in _PROJECTIONS:
            start, size = _PROJECTIONS.index(part) * self.hidden_size, self.hidden_size
            rows = RowParts(groups=1, size=3 * size, start=start, stop=start + size)
            return (WeightTensor(f"{front}{kind.fused}.{end}", rows=rows),)
        frames = (self.frames,) if kind.rotary else ()
        kernel = (self.hidden_size, self.num_channels, *frames, self.patch_size, self.patch_size)
        stored = f"{front}{kind.names[part]}.{end}"
        return (WeightTensor(stored, shape=kernel if inner == "embed.patch.weight" else ()),)

    def initial(self, name: str) -> InitialValue:
        """The initial value of a parameter of the encoder, by its name within the encoder."""
        if name.endswith(".bias"):
            return InitialValue("zeros")
        if name.endswith((".scale1", ".scale2")):
            return InitialValue("constant", number=self.layer_scale)
        return InitialValue("ones") if "norm" in name else InitialValue("normal", self.initializer_range)


def read(config: Mapping[str, Any], where: str) -> VisionConfig:
    """Return the typed configuration of the config.json of an encoder, or of a SigLIP with two towers. Raises
    ModelError."""
    if config.get("model_type") == "siglip":  # two towers: take the image encoder
        tower = config.get("vision_config", {})
        if not isinstance(tower, Mapping):
            raise ConfigFields(config, where).wrong_field("vision_config", tower, "a JSON object")
        config = {"model_type": "siglip_vision_model", **tower}
    known = ENCODER_TYPES.get(str(config.get("model_type")))
    fields = ConfigFields({**known.sizes, **config} if known else config, where)
    model_type = fields.read_choice("model_type", default="", allowed={name: name for name in ENCODER_TYPES})
    kind = ENCODER_TYPES[model_type]
    usual = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_channels")
    names = {name: kind.fields.get(name, name) for name in usual}
    hidden, heads = fields.width_of_heads((names["hidden_size"],), (names["num_attention_heads"],))
    patch = _read_side(fields, "patch_size", 16)
    image = _table_side(fields, kind) * patch if kind.rotary else _read_side(fields, "image_size", 224)
    fields.check_fields(
        kind.rotary or image >= patch,
        "An image is smaller than a patch.",
        f"image_size {image}, patch_size {patch}",
        "at least one patch",
    )
    for dropout in (
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "attention_dropout",
        "projection_dropout",
    ):
        if fields.read_number(dropout, default=0.0) > 0:
            warnings.warn(f"{where}: {dropout} is ignored: the encoder is computed without dropout", stacklevel=2)
    channels = fields.read_count(names["num_channels"], default=3)
    bias, bias_default = kind.qkv_bias
    return VisionConfig(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=fields.read_count("intermediate_size", default=4 * hidden),
        num_hidden_layers=fields.read_count(names["num_hidden_layers"]),
        num_attention_heads=heads,
        activation=fields.read_choice("hidden_act", default=kind.activation, allowed=ACTIVATIONS),
        layer_norm_eps=fields.read_number("layer_norm_eps", default=kind.eps),
        image_size=image,
        patch_size=patch,
        num_channels=channels,
        qkv_bias=fields.read_flag(bias, default=bias_default) if bias else bias_default,
        image_mean=_per_channel(fields, "image_mean", channels),
        image_std=_per_channel(fields, "image_std", channels),
        initializer_range=fields.read_number("initializer_range", default=0.02),
        **(_scaled_layers(fields) if kind.layer_scale else {}),
        **(_rotary_patches(fields, kind, hidden // heads, patch) if kind.rotary else {}),
    )


def _scaled_layers(fields: ConfigFields) -> dict[str, Any]:
    """Return the options of InternVL's layers. Raises UnsupportedModelError for a mask token or no positions."""
    for name, allowed in (("use_mask_token", False), ("use_absolute_position_embeddings", True)):
        value = fields.read_flag(name, default=allowed)
        if value != allowed:
            raise fields.wrong_field(name, value, str(allowed).lower(), UnsupportedModelError)
    norms = {"layer_norm": "layer", "rms_norm": "rms"}
    scale = fields.read_number("layer_scale_init_value", default=0.1)
    fields.check_fields(scale > 0, "The layers' scale begins with zero.", "layer_scale_init_value 0", "above zero")
    return {
        "norm_kind": fields.read_choice("norm_type", default="layer_norm", allowed=norms),
        "qk_norm": fields.read_flag("use_qk_norm", default=False),
        "layer_scale": scale,
    }


def _rotary_patches(fields: ConfigFields, kind: EncoderType, head_dim: int, patch: int) -> dict[str, Any]:
    """Return the options of an encoder whose patches have rotary positions. Raises ModelError."""
    fields.check_fields(
        head_dim % 4 == 0,
        "Rows and columns of patches turn pairs of a head's features.",
        f"{head_dim} features of a head",
        "a multiple of 4",
    )
    parameters = fields.first_value("rope_parameters", default={})
    if not isinstance(parameters, Mapping) or parameters.get("rope_type", "axial") != "axial":
        raise fields.wrong_field("rope_parameters", parameters, "an object with rope_type 'axial'")
    rope = ConfigFields(parameters, f"{fields.where}, rope_parameters")
    merge = fields.read_count("spatial_merge_size", default=2)
    options: dict[str, Any] = {
        "merge": merge,
        "frames": fields.read_count("temporal_patch_size", default=2),
        "rotary_theta": rope.read_number("rope_theta", default=1e4),
        "norm_kind": "rms" if kind.rms_norms else "layer",
    }
    if "window_size" in kind.sizes:
        options |= _read_windows(fields, merge * patch)
    if kind.stacked:
        options["stacked"] = _read_stacked(fields)
    return options


def _read_windows(fields: ConfigFields, token_side: int) -> dict[str, Any]:
    """Return the options of attention within windows, for tokens of this many pixels a side. Raises ModelError."""
    window, full = fields.read_count("window_size"), fields.first_value("fullatt_block_indexes")
    if window < token_side:
        raise fields.wrong_field("window_size", window, f"at least the {token_side} pixels of a token")
    if not isinstance(full, (list, tuple)) or not all(isinstance(i, int) and i >= 0 for i in full):
        raise fields.wrong_field("fullatt_block_indexes", full, "a list of layers, counted from 0")
    return {"window": window // token_side, "full_layers": tuple(sorted({*full}))}


def _read_stacked(fields: ConfigFields) -> tuple[int, ...]:
    """Return the layers whose results enter the language model. Raises ModelError."""
    layers, depth = fields.first_value("deepstack_visual_indexes"), fields.read_count("depth")
    good = isinstance(layers, (list, tuple)) and all(isinstance(i, int) and 0 <= i < depth for i in layers)
    if not good or len({*layers}) < len(layers):
        raise fields.wrong_field(
            "deepstack_visual_indexes", layers, f"a list of different layers of the encoder, 0 to {depth - 1}"
        )
    return tuple(layers)


def _table_side(fields: ConfigFields, kind: EncoderType) -> int:
    """Return the rows of a square table of positions; 0: the type has none. Raises ModelError for another table."""
    if not kind.stacked:
        return 0
    count = fields.read_count("num_position_embeddings")
    if math.isqrt(count) ** 2 != count:
        raise fields.wrong_field("num_position_embeddings", count, "the square of a number")
    return math.isqrt(count)


def _read_side(fields: ConfigFields, name: str, default: int) -> int:
    """Return the side of a square, which a configuration may give twice."""
    value = fields.first_value(name, default=default)
    if isinstance(value, (list, tuple)):
        if len(value) != 2 or value[0] != value[1]:
            raise fields.wrong_field(name, list(value), "one side, or two equal sides")
        fields = ConfigFields({**fields.config, name: value[0]}, fields.where)
    return fields.read_count(name, default=default)


def _per_channel(fields: ConfigFields, name: str, channels: int) -> tuple[float, ...]:
    values = fields.first_value(name, default=[0.5] * channels)
    numbers = isinstance(values, (list, tuple)) and all(isinstance(v, (int, float)) for v in values)
    good = numbers and all(v >= 0 if name == "image_mean" else v > 0 for v in values)
    if not good or len(values) != channels:
        range_text = "zero or more" if name == "image_mean" else "above zero"
        raise fields.wrong_field(name, values, f"{channels} numbers {range_text}, one a channel")
    return tuple(map(float, values))
