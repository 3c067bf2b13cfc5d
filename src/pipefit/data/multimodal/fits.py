"""The image format a model requires, for indexing samples, and the check that an index fits a model.

The check runs when a plan is made and when a run starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipefit.data.multimodal.images import CHANNELS, ImageRule
from pipefit.data.multimodal.index import GENERATE, IMAGE, SampleIndex
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES, SampleRows
from pipefit.errors import DataError
from pipefit.model.families import FAMILIES
from pipefit.model.families.multimodal.config import MultimodalConfig
from pipefit.model.families.multimodal.vision_config import VisionConfig
from pipefit.model.graph import Layer, Model, TensorSpec
from pipefit.model.registry import resolve_model, typed_config

FLAGS = {
    IMAGE: {"patch": "--patch", "max_patches": "--max-patches", "side": "--side", "start_token": "--start-token"},
    GENERATE: {"patch": "--latent-patch", "max_patches": "--max-latents"},
}
"""The fields of an image rule as options of `pipefit data`."""

FIXED = ("patch", "start_token")
"""Fields for which a model accepts one value only; positions are interpolated, so images may be of any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequirements:
    """The requirements of a model on its samples."""

    images: ImageRule | None
    "None: the model takes no input images."
    generated: ImageRule | None
    "None: the model generates no images, or latents that are not pixels."
    vocabulary: int
    "Vocabulary size of the model."

    def image_rule(self, kind: int) -> ImageRule | None:
        return self.generated if kind == GENERATE else self.images


def requirements_of_model(model: str) -> SampleRequirements:
    """Return the image requirements of the model named by `--model`; images are at most as large as its position
    tables.

    Raises ModelError or FormatError as `resolve_model` does. Raises DataError if it is not an image model, or not one
    of three-channel images.
    """
    described = resolve_model(model)
    config = _image_config(described.family, described.config, model)
    if config is None:
        raise DataError(
            "This model does not define an image format.",
            where="--model",
            seen=f"{model}, of the family {described.family}",
            allowed="a model with an image encoder or an image generator",
            next_step="leave --model out, and give --patch and the other image options",
        )
    return sample_requirements(config)


def _image_config(family: str, config: Mapping[str, Any], where: str = "config") -> MultimodalConfig | None:
    """Return the configuration of a model with images, None for a model of another family."""
    typed = typed_config(family, config, where) if family in FAMILIES else None
    return typed if isinstance(typed, MultimodalConfig) else None


def sample_requirements(config: MultimodalConfig) -> SampleRequirements:
    """Return the requirements of the model with this configuration. Raises DataError as `requirements_of_model`
    does."""
    vision, generator = config.vision, config.generator
    if vision is not None and vision.num_channels != CHANNELS:
        raise DataError(
            "The images of an index have three channels, red, green and blue, and the model takes others.",
            where="vision, num_channels",
            seen=vision.num_channels,
            allowed=str(CHANNELS),
        )
    looked = None
    if vision is not None:
        looked = image_rule_of(vision, one_size=config.joint_names is not None and not vision.encoder_type.rotary)
    drawn = pixel_side(generator.latent_size) if generator is not None else 0
    return SampleRequirements(
        images=looked,
        generated=ImageRule(patch=drawn, max_patches=generator.grid_size**2)
        if generator is not None and drawn
        else None,
        vocabulary=config.language.decoder.vocab_size,
    )


def image_rule_of(vision: VisionConfig, one_size: bool) -> ImageRule:
    """Return the conversion of images for an encoder; `one_size`: to the size of its table of positions. Without a
    table, images have any size."""
    side = vision.grid_side // vision.merge
    return ImageRule(
        patch=vision.cell_side,
        max_patches=side**2 or ImageRule().max_patches,
        side=side * vision.cell_side if one_size else 0,
        start_token=vision.start_token,
        drops_start=vision.drops_start,
        end_token=vision.end_token,
        window=vision.window,
    )


def pixel_side(values: int) -> int:
    """Return the side of the square of pixels with this number of values; 0 if there is none."""
    side = math.isqrt(values // CHANNELS)
    return side if CHANNELS * side**2 == values else 0


def rule_for(found: SampleRequirements | None, kind: int, given: Mapping[str, Any]) -> ImageRule:
    """Return the image rule of a kind: the model's or the default, with the options in `given` applied (None: not set).

    Raises DataError if an option contradicts the model.
    """
    known = found.image_rule(kind) if found is not None else None
    asked = {name: value for name, value in given.items() if value is not None}
    for name in FIXED:
        if known is not None and name in asked and asked[name] != getattr(known, name):
            raise DataError(
                "The option contradicts the image format of the model.",
                where=FLAGS[kind][name],
                seen=asked[name],
                allowed=str(getattr(known, name)),
                next_step="leave the option out: the model defines it",
            )
    return replace(known or ImageRule(), **asked)


def check_vocabulary(vocabulary: int, known: int, where: str) -> None:
    """Raise DataError for a tokenizer with more tokens than the model's vocabulary."""
    if vocabulary > known:
        raise DataError(
            "The tokenizer of the index has more tokens than the model knows.",
            where=where,
            seen=vocabulary,
            allowed=f"at most {known}",
        )


def check_index(model: Model, index: SampleIndex, rows: SampleRows) -> None:
    """Raise DataError if samples need a module that the model lacks, or their patches differ from the model's."""
    spaces = {module.space for module in model.modules}
    widths = {
        name: (tensor.shape[-1], tensor.dtype)
        for module in model.modules
        for name, tensor in data_inputs(model, module.layers).items()
    }
    for space, kind, name, words in (
        (PATCHES, IMAGE, "pixels", "to look at"),
        (LATENTS, GENERATE, "noisy", "to generate"),
    ):
        count = int(rows.counts[space].sum())
        if count and space not in spaces:
            raise DataError(
                f"The samples have images {words}, and the model has no module for them.",
                where=str(index.folder),
                seen=f"{count} tokens of {space}",
                allowed=f"samples without images {words}, or a model with that module",
            )
        values = index.image_rule(kind).patch_values
        if space in spaces and name in widths and widths[name][0] != values:
            side = pixel_side(int(widths[name][0]))
            raise DataError(
                "The patches of the images do not fit the model.",
                where=str(index.folder),
                seen=f"{values} numbers a patch of images {words}",
                allowed=f"{widths[name][0]}",
                next_step=f"pipefit data SOURCE -o INDEX --model MODEL, or {FLAGS[kind]['patch']} {side}"
                if side
                else "a model whose patches are square and of three channels",
            )
    config = _image_config(model.family, model.config)
    if config is not None:
        _check_rules(sample_requirements(config), index, rows)


def _check_rules(found: SampleRequirements, index: SampleIndex, rows: SampleRows) -> None:
    """Check start and end tokens, the order of patches and token ids, which the input widths do not show."""
    rule = index.image_rule(IMAGE)
    wanted = found.images
    if wanted is not None and rows.counts[PATCHES].any() and _extra_tokens(rule) != _extra_tokens(wanted):
        raise DataError(
            "The index and the model disagree on the tokens of images.",
            where=str(index.folder),
            seen=_extra_tokens(rule),
            allowed=_extra_tokens(wanted),
            next_step="pipefit data SOURCE -o INDEX --model MODEL",
        )
    check_vocabulary(index.summary.vocabulary, found.vocabulary, str(index.folder))
    request = index.summary.request
    for name, token in (("image_token", request.image_token), ("generation_token", request.generation_token)):
        if token >= found.vocabulary:
            raise DataError(
                "The placeholder id of images is outside the model's vocabulary.",
                where=f"{index.folder}, {name}",
                seen=token,
                allowed=f"below {found.vocabulary}",
                next_step=f"pipefit data SOURCE -o INDEX --{name.replace('_', '-')} ID",
            )


def _extra_tokens(rule: ImageRule) -> str:
    """Return the start token, the end token and the order of patches of an image in words."""
    start = "without a start token"
    if rule.start_token:
        start = "with a start token" + (" outside of the sequence" if rule.drops_start else "")
    windows = f", in windows of {rule.window} x {rule.window} patches" if rule.window else ""
    return f"{start}{', with an end token' if rule.end_token else ''}{windows}"


def data_inputs(model: Model, layers: Iterable[Layer]) -> dict[str, TensorSpec]:
    """Return the inputs of these layers that come from the step plan, by name."""
    return {
        tensor.name: tensor
        for layer in layers
        for tensor in model.layer_graph(layer).inputs
        if tensor.role != "activation"
    }
