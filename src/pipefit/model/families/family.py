"""What a model family promises: how to read its configuration, name its weights in files, and start them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class ModelConfig(Protocol):
    """The typed configuration of one model."""

    def to_config(self) -> dict[str, Any]:
        """In the words of a Hugging Face config.json; reading it back gives an equal configuration."""

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        """How the parameter of that global name stands in Hugging Face's safetensors files."""

    def initial(self, name: str) -> InitialValue:
        """What the parameter of that global name is before training."""


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor of a weights file, and which part of a parameter it is."""

    name: str
    index: tuple[int | tuple[int, int], ...] = ()
    "Of the parameter, along its leading dimensions: an index, or a half-open range. () is all of it."
    transposed: bool = False
    "The file holds (in, out) where the parameter is (out, in)."
    shape: tuple[int, ...] = ()
    "In the file, where it is another than the parameter's: the same numbers in order."


@dataclass(frozen=True, slots=True)
class InitialValue:
    """The first value of a parameter."""

    kind: Literal["ones", "zeros", "normal"]
    std: float = 0.0
    "Of the normal distribution, mean 0."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A kind of model that we can build."""

    name: str
    model_types: tuple[str, ...]
    "The values of `model_type` in a config.json that belong to it."
    read: Callable[[Mapping[str, Any], str], ModelConfig]
    "(config, where) -> typed configuration. Raises ModelError."
    builder: str
    "Module with `build(config) -> list[nn.Module]`; it imports torch."
