"""The interface of a model family: read its configuration, name its stored weights, and give initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

from pipefit.errors import ModelError
from pipefit.model.ops.kind import InitialKind

TUNING_FIELDS = ("adapters", "freeze")
"""Fields of a model's configuration that no family reads: adapters, and frozen parameters (`model/adapters/`)."""


def without_tuning(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the base model: without adapters and frozen parameters."""
    if not any(name in config for name in TUNING_FIELDS):
        return config
    return {name: value for name, value in config.items() if name not in TUNING_FIELDS}


class ModelConfig(Protocol):
    """The typed configuration of one model."""

    def to_config(self) -> dict[str, Any]:
        """The fields of a Hugging Face config.json; reading them back gives an equal configuration."""

    def stored_tensors(self, name: str) -> tuple[WeightTensor, ...]:
        """The tensors of Hugging Face's safetensors files that hold the parameter with this global name."""

    def initial(self, name: str) -> InitialValue:
        """The initial value of the parameter with this global name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParts:
    """The rows of one parameter in a stored tensor that holds several: rows `start` to `stop` of each of `groups` equal
    groups of `size` rows."""

    groups: int
    size: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor of a weights file, and the part of a parameter that it holds."""

    name: str
    index: tuple[int | tuple[int, int], ...] = ()
    "Index or half-open range along the leading dimensions of the parameter; () is the entire parameter."
    transposed: bool = False
    "The file holds (..., in, out) for a parameter (..., out, in)."
    shape: tuple[int, ...] = ()
    "Shape in the file if it differs from the parameter's: the same numbers in order."
    heads: int = 0
    """For a fused projection, the number of heads. The rows of the parameter are those of query, key and value of head
    0, then of head 1, and so on; the file holds all queries, then all keys, then all values."""
    alternating: bool = False
    """For stacked experts (E, 2F, ...): the file alternates the rows of the two halves of the second dimension."""
    rows: RowParts | None = None
    "The rows of the tensor that are this parameter, if the file holds several parameters in one tensor."
    further_names: tuple[str, ...] = ()
    "Names that the tensor has in other files of the same model."


@dataclass(frozen=True, slots=True)
class InitialValue:
    """The initial value of a parameter."""

    kind: InitialKind
    std: float = 0.0
    "Standard deviation of the normal or uniform distribution, mean 0."
    number: float = 0.0
    "The number of the kind `constant`."

    def __post_init__(self) -> None:
        if self.kind not in get_args(InitialKind) or self.std < 0:
            raise ModelError(
                "The initial value of a parameter is wrong.",
                where="InitialValue of a model family",
                seen=f"{self.kind!r}, standard deviation {self.std}",
                allowed=f"{', '.join(get_args(InitialKind))}; a standard deviation of 0 or more",
            )

    @property
    def fixed_number(self) -> float | None:
        """The number that all elements have; None if they are drawn."""
        return {"ones": 1.0, "zeros": 0.0, "constant": self.number}.get(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A kind of model that pipefit can build."""

    name: str
    model_types: tuple[str, ...]
    "The values of `model_type` in a config.json that select this family."
    read: Callable[[Mapping[str, Any], str], ModelConfig]
    "(config, where) -> typed configuration. Raises ModelError."
    builder: str
    "Module with `build(config) -> list[nn.Module]`; it imports torch."
    graphs: str = ""
    """Module with `write_model(family, config, typed) -> Model`, which writes the graphs without torch; '': the family
    is captured only."""
    parts: tuple[str, ...] = ()
    "Fields of a config.json that may name the directory of another model, whose config.json replaces them."
    complete_config: Callable[[Mapping[str, Any], Path, Mapping[str, Path]], dict[str, Any]] | None = None
    "(config, its folder, folders of its parts) -> configuration with the fields of other files in them."
