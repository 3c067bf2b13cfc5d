"""AdamW on flat pieces, with warm-up and decay of the learning rate.

The update is that of Loshchilov and Hutter (2019, decoupled weight decay), in the order of operations of
`torch.optim.AdamW`. It is elementwise on flat tensors, so the split of parameters into pieces has no effect. Under
bfloat16 the updated values are float32 masters, and the parameters are rounded copies of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipefit.run.update.optimizer_config import OptimizerConfig


def update_elements(device: torch.device) -> int:
    """Return the number of elements that the norm and an update process at a time. It bounds their temporary memory:
    128 MiB on CUDA, with few kernels; 2 MiB on a CPU, which stay in the cache."""
    return 1 << (24 if device.type == "cuda" else 18)


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
