"""The settings of the optimizer. Its fields are options of `pipefit train`, and the strings below them their help."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pipefit.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """All settings of the update. Written into the run's config.json; a resumed run takes them from its command
    line."""

    lr: float = 3e-4
    "Peak learning rate."
    beta1: float = 0.9
    "Decay of AdamW's first moment."
    beta2: float = 0.95
    "Decay of AdamW's second moment."
    eps: float = 1e-8
    "AdamW's epsilon."
    weight_decay: float = 0.1
    "Decoupled weight decay; not applied to norms and biases."
    decay_one_dimensional: bool = False
    "Decay parameters with one dimension as well."
    max_norm: float = 1.0
    "Clip gradients to this global norm; 0 turns it off."
    warmup: int = 0
    "Steps of linear warm-up."
    steps: int = 0
    "Steps of the whole run, at which the decay ends; 0 means no decay."
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    "After the warm-up: cosine, linear or constant."
    min_lr_ratio: float = 0.1
    "Learning rate at the last step, as a share of the peak."


def check_config(config: OptimizerConfig) -> OptimizerConfig:
    """Return the configuration unchanged. Raises RunError naming the first invalid field."""
    limits = {
        "lr": (config.lr > 0, "a number above 0"),
        "beta1": (0 <= config.beta1 < 1, "from 0 up to but not 1"),
        "beta2": (0 <= config.beta2 < 1, "from 0 up to but not 1"),
        "eps": (config.eps > 0, "a number above 0"),
        "weight_decay": (config.weight_decay >= 0, "a number, 0 or more"),
        "max_norm": (config.max_norm >= 0, "a number, 0 (off) or more"),
        "warmup": (config.warmup >= 0, "a number, 0 or more"),
        "decay": (config.decay in ("cosine", "linear", "constant"), "cosine, linear or constant"),
        "min_lr_ratio": (0 <= config.min_lr_ratio <= 1, "0 to 1"),
    }
    for name, (good, allowed) in limits.items():
        value = getattr(config, name)
        if not good or (isinstance(value, float) and not math.isfinite(value)):
            option = f"--{name.replace('_', '-')}"
            raise RunError("The optimizer cannot run with this.", where=option, seen=value, allowed=allowed)
    return config
