"""AdamW: Loshchilov and Hutter (2019, decoupled weight decay), in the order of operations of `torch.optim.AdamW`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipefit.optimizers.base import ElementwiseState, OptimizerKind, OptimizerOptions, register_optimizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWOptions(OptimizerOptions):
    """The options of AdamW."""

    lr: float = 3e-4
    "Peak learning rate."
    weight_decay: float = 0.1
    "Decoupled; parameters with one dimension (norms, biases) are not decayed."
    beta1: float = 0.9
    "Decay of the first moment."
    beta2: float = 0.95
    "Decay of the second moment."
    eps: float = 1e-8
    "Added to the root of the second moment."

    def option_limits(self) -> Mapping[str, tuple[bool, str]]:
        return {
            **OptimizerOptions.option_limits(self),
            "beta1": (0 <= self.beta1 < 1, "from 0 up to but not 1"),
            "beta2": (0 <= self.beta2 < 1, "from 0 up to but not 1"),
            "eps": (self.eps > 0, "a number above 0"),
        }


class AdamWState(ElementwiseState):
    """Two moments per element."""

    options: AdamWOptions

    def update_run(self, value: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], lr: float, count: int) -> None:
        options, first, second = self.options, moments["first"], moments["second"]
        if self.decay:
            value.mul_(1.0 - lr * self.decay)
        first.lerp_(gradient, 1.0 - options.beta1)
        second.mul_(options.beta2).addcmul_(gradient, gradient, value=1.0 - options.beta2)
        denominator = second.sqrt().div_(math.sqrt(1.0 - options.beta2**count)).add_(options.eps)
        value.addcdiv_(first, denominator, value=-lr / (1.0 - options.beta1**count))


ADAMW = register_optimizer(
    OptimizerKind(
        name="adamw",
        summary="AdamW: two moments per element",
        options=AdamWOptions,
        state=AdamWState,
        moments=("first", "second"),
    )
)
