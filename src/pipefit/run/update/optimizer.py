"""AdamW on flat pieces, with warm-up and decay of the learning rate.

The update is that of Loshchilov and Hutter (2019, decoupled weight decay), in the order of operations of
`torch.optim.AdamW`. It is elementwise on flat tensors, so the split of parameters into pieces has no effect. Under
bfloat16 the updated values are float32 masters, and the parameters are rounded copies of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipefit.errors import RunError


def update_elements(device: torch.device) -> int:
    """Return the number of elements that the norm and an update process at a time. It bounds their temporary memory:
    128 MiB on CUDA, with few kernels; 2 MiB on a CPU, which stay in the cache."""
    return 1 << (24 if device.type == "cuda" else 18)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """All settings of the update. Written into the run's config.json; a resumed run takes them from its command
    line."""

    lr: float = 3e-4
    "Peak learning rate."
    beta1: float = 0.9
    "Decay of the first moment."
    beta2: float = 0.95
    "Decay of the second moment."
    eps: float = 1e-8
    "Added to the root of the second moment."
    weight_decay: float = 0.1
    "Decoupled; parameters with one dimension (norms, biases) are not decayed."
    decay_one_dimensional: bool = False
    "Decay parameters with one dimension as well."
    max_norm: float = 1.0
    "Gradients are scaled down to this global norm; 0 turns clipping off."
    warmup: int = 0
    "Steps of linear warm-up."
    steps: int = 0
    "Steps of the whole run, at which the decay ends; 0 means no decay."
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    "Shape of the decay after the warm-up."
    min_lr_ratio: float = 0.1
    "Learning rate at the end, as a fraction of the peak."


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


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of step `step`, counted from 0: linear warm-up, then the chosen decay down to the
    minimum."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.decay == "constant" or config.steps <= config.warmup:
        return config.lr
    progress = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    if config.decay == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


class AdamW:
    """The optimizer state of one flat piece, and its update in place.

    `parameter` is the trained piece (a flat view into the stage's parameters). If `master_dtype` differs from its
    dtype, `master` is a separate copy in that dtype; else `master` is the piece itself.
    """

    def __init__(self, parameter: Tensor, master_dtype: torch.dtype, config: OptimizerConfig, decays: bool) -> None:
        assert parameter.dim() == 1 and parameter.is_contiguous()
        self.config = config
        self.decay = config.weight_decay if decays else 0.0
        self.parameter = parameter.detach()
        self.master = self.parameter.to(master_dtype)  # the same tensor if the dtype is the same
        self.first = torch.zeros_like(self.master)
        self.second = torch.zeros_like(self.master)

    @property
    def has_master(self) -> bool:
        """True if the master copy is separate from the parameter."""
        return self.master is not self.parameter

    def step(self, gradient: Tensor, lr: float, count: int) -> None:
        """Update with `gradient` (flat, of the master's dtype); `count` is the number of updates, including this
        one."""
        config = self.config
        step_size = lr / (1.0 - config.beta1**count)
        root = math.sqrt(1.0 - config.beta2**count)
        size = update_elements(self.master.device)
        for start in range(0, self.master.numel(), size):
            run = slice(start, start + size)
            value, grad, first, second = self.master[run], gradient[run], self.first[run], self.second[run]
            if self.decay:
                value.mul_(1.0 - lr * self.decay)
            first.lerp_(grad, 1.0 - config.beta1)
            second.mul_(config.beta2).addcmul_(grad, grad, value=1.0 - config.beta2)
            denominator = second.sqrt().div_(root).add_(config.eps)
            value.addcdiv_(first, denominator, value=-step_size)
        self.round_master()

    def round_master(self) -> None:
        """Round the master copy into the parameter."""
        if self.has_master:
            self.parameter.copy_(self.master)
