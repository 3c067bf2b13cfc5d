"""A language model with rotary positions on three axes: time, and row and column of an image (M-RoPE, Wang et al.,
2024). It is another decoder whose pairs of features turn by the positions of their axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipefit.model.families.config_fields import ConfigFields
from pipefit.model.families.decoder.options import DecoderOptions
from pipefit.model.families.family import InitialValue, WeightTensor
from pipefit.model.families.multimodal.joint_fields import LanguageConfig, read_text
from pipefit.model.ops.rotary import AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisDefaults:
    """The language model of a model type, where its fields are absent."""

    base_type: str
    "The model type of the same decoder with one position a token."
    theta: float
    sections: tuple[int, ...]
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLanguage:
    """The configuration of a decoder, with the axis of each pair of features."""

    model_type: str
    base: LanguageConfig
    "The same decoder with one position a token."
    sections: tuple[int, ...]
    "Pairs of each axis."
    interleaved: bool
    "Whether the axes alternate from pair to pair, instead of following each other."
    stacked: int = 0
    "First layers that get features of the encoder."

    @property
    def pair_axes(self) -> list[int]:
        """The axis of each pair."""
        if not self.interleaved:
            return [axis for axis, pairs in enumerate(self.sections) for _ in range(pairs)]
        return [i % AXES if i < AXES * self.sections[i % AXES] else 0 for i in range(sum(self.sections))]

    @property
    def decoder(self) -> DecoderOptions:
        options = self.base.decoder
        rotary = tuple({**(rotary or {}), "axes": self.pair_axes} for rotary in options.rotary)
        return dataclasses.replace(options, rotary=rotary, stacked=self.stacked)

    @property
    def rotary(self) -> Any:
        """The attributes of rotary operators with one position a token."""
        return self.base.rotary

    def to_config(self) -> dict[str, Any]:
        config = {name: value for name, value in self.base.to_config().items() if name != "architectures"}
        scaling = {"rope_type": "default", **(config["rope_scaling"] or {}), "mrope_section": list(self.sections)}
        interleaved = {"mrope_interleaved": True} if self.interleaved else {}
        return {**config, "model_type": self.model_type, "rope_scaling": {**scaling, **interleaved}}

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        return self.base.stored_tensors(name)

    def initial(self, name: str) -> InitialValue:
        return self.base.initial(name)


def read_axis_text(fields: ConfigFields, text: Mapping[str, Any], tied: bool, usual: AxisDefaults) -> AxisLanguage:
    """Return the language model of these fields, whose output projection is its table of tokens by `tied`. Raises
    ModelError."""
    rope = _rotary_fields(text, f"{fields.where}, text_config", usual)
    pairs, interleaved = rope.pop("mrope_section", None) or usual.sections, usual.interleaved
    plain = {name: value for name, value in text.items() if name != "rope_scaling"}
    base = read_text(fields, {**plain, "model_type": usual.base_type, "rope_parameters": rope}, tied)
    counts = isinstance(pairs, (list, tuple)) and all(isinstance(n, int) and n >= 0 for n in pairs)
    half = base.rotary["dim"] // 2
    language = AxisLanguage(
        model_type=str(text["model_type"]), base=base, sections=tuple(pairs) if counts else (), interleaved=interleaved
    )
    if len(language.sections) != AXES or sum(language.sections) != half or _last_pair(language) > half:
        rule = "in turn, the last two of at most a third each" if interleaved else "one after the other"
        text_fields = ConfigFields(text, f"{fields.where}, text_config")
        raise text_fields.wrong_field("mrope_section", pairs, f"{AXES} numbers of pairs that sum to {half}, {rule}")
    return language


def _rotary_fields(text: Mapping[str, Any], where: str, usual: AxisDefaults) -> dict[str, Any]:
    """Return the rotary parameters of a text configuration, without the names of several axes. Raises ModelError."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(text.get(name) or {}, Mapping):
            raise ConfigFields(text, where).wrong_field(name, text[name], "an object")
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    rope.pop("mrope_interleaved", None)
    if rope.get("rope_type", rope.get("type")) == "mrope":
        rope["rope_type"] = "default"
    if text.get("rope_theta") is None:
        rope.setdefault("rope_theta", usual.theta)
    return rope


def _last_pair(language: AxisLanguage) -> int:
    """Return the number of pairs up to the last one of rows and columns, if axes alternate."""
    return AXES * max(language.sections[1:]) if language.interleaved else 0
