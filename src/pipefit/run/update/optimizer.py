"""The settings of the update, and the learning rate of a step: warm-up, then decay.

The optimizers are in `pipefit.optimizers`; the plan names one of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipefit.errors import RunError
from pipefit.optimizers import OptimizerKind, OptimizerOptions, read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """All settings of the update. Written into the run's config.json; a resumed run takes them from its command
    line."""

    lr: float | None = None
    "Peak learning rate. Default: the optimizer's, for AdamW 3e-4."
    weight_decay: float | None = None
    "Weight decay, not applied to norms and biases. Default: the optimizer's, for AdamW 0.1."
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    "Other options of the optimizer, such as beta1 or momentum."
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
    """Return the configuration unchanged. Raises RunError naming the first invalid field.

    `optimizer_options` checks the options of the optimizer.
    """
    limits = {
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


def optimizer_options(config: OptimizerConfig, optimizer: OptimizerKind) -> OptimizerOptions:
    """Return the optimizer's options: those of the configuration, else its defaults. Raises RunError as `read_options`
    does."""
    common = {"lr": config.lr, "weight_decay": config.weight_decay}
    return read_options(
        optimizer, {**config.options, **{name: value for name, value in common.items() if value is not None}}
    )


def parse_options(texts: Iterable[str]) -> dict[str, float]:
    """Return the options written as NAME=VALUE; a switch takes true or false. Raises RunError for any other text."""
    options = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            options[name.strip()] = float({"true": "1", "false": "0"}.get(value.strip(), value))
        except ValueError:
            raise RunError(
                "An option of the optimizer is written NAME=VALUE, with a number, true or false.",
                where="--optimizer-option",
                seen=repr(text),
                allowed="for example beta1=0.9",
            ) from None
    return options


def learning_rate(config: OptimizerConfig, peak: float, step: int) -> float:
    """Return the learning rate of step `step`, counted from 0: linear warm-up to `peak`, then the chosen decay down to
    the minimum."""
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    if config.decay == "constant" or config.steps <= config.warmup:
        return peak
    progress = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    if config.decay == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
