"""Options of low-rank adapters and frozen parameters, and their place in a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipefit import codec
from pipefit.errors import ModelError
from pipefit.model.families import without_tuning
from pipefit.model.families.family import TUNING_FIELDS

ALL_LINEAR = "all-linear"
"""The target that selects every linear layer except the output head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The low-rank adapters of a model: y = W x + scale B A dropout(x)."""

    rank: int
    "Rows of A and columns of B."
    alpha: float
    "Numerator of the factor of B A."
    dropout: float = 0.0
    "Probability of a zero in the input of A."
    targets: tuple[str, ...] = (ALL_LINEAR,)
    "`all-linear`, or names of modules: the end of a module's path, as for PEFT."
    rslora: bool = codec.added_later(False)
    "Whether the scale is alpha / sqrt(rank) (arXiv 2312.03732) instead of alpha / rank."

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def check_adapters(config: AdapterConfig) -> AdapterConfig:
    """Return the options unchanged. Raises ModelError naming the first wrong one."""
    rules = {
        "--lora": (config.rank >= 1, config.rank, "a whole number above zero"),
        "--lora-alpha": (math.isfinite(config.alpha) and config.alpha > 0, config.alpha, "a number above zero"),
        "--lora-dropout": (0 <= config.dropout < 1, config.dropout, "a probability from 0 up to 1"),
        "--lora-targets": (
            bool(config.targets) and all(config.targets),
            ",".join(config.targets),
            f"{ALL_LINEAR}, or names of modules such as q_proj,v_proj",
        ),
    }
    for option, (good, seen, allowed) in rules.items():
        if not good:
            raise ModelError("An option of the adapters has a wrong value.", where=option, seen=seen, allowed=allowed)
    if ALL_LINEAR in config.targets and len(config.targets) > 1:
        raise ModelError(
            f"{ALL_LINEAR} selects all linear layers, and stands alone.",
            where="--lora-targets",
            seen=",".join(config.targets),
            allowed=f"{ALL_LINEAR}, or names of modules",
        )
    return config


def tuned_config(
    config: Mapping[str, Any], adapters: AdapterConfig | None, freeze: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a model's configuration with adapters and patterns of frozen parameters."""
    tuned = dict(without_tuning(config))
    if adapters is not None:
        tuned["adapters"] = codec.to_data(adapters)
    if freeze:
        tuned["freeze"] = list(freeze)
    return tuned


def tuning_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that name adapters and frozen parameters."""
    return {name: config[name] for name in TUNING_FIELDS if name in config}


def is_tuned(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration names adapters or frozen parameters."""
    return bool(tuning_of(config))


def read_adapters(config: Mapping[str, Any]) -> AdapterConfig | None:
    """Return the adapters of a model's configuration, None without any. Raises FormatError or ModelError."""
    if "adapters" not in config:
        return None
    return check_adapters(codec.from_data(AdapterConfig, config["adapters"], "model.config.adapters"))


def read_freeze(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the patterns of frozen parameters in a model's configuration. Raises FormatError."""
    return codec.from_data(tuple[str, ...], config.get("freeze", []), "model.config.freeze")
