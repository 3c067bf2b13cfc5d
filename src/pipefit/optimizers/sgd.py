"""Stochastic gradient descent with momentum, in the order of operations of `torch.optim.SGD`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipefit.optimizers.base import ElementwiseState, OptimizerKind, OptimizerOptions, register_optimizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SGDOptions(OptimizerOptions):
    """The options of SGD with momentum."""

    lr: float = 1e-2
    "Peak learning rate."
    weight_decay: float = 0.0
    "Added to the gradient times the parameter; parameters with one dimension (norms, biases) are not decayed."
    momentum: float = 0.9
    "Decay of the momentum."
    dampening: float = 0.0
    "Part of the gradient that does not enter the momentum."
    nesterov: bool = False
    "Look ahead by one step (Nesterov)."

    def option_limits(self) -> Mapping[str, tuple[bool, str]]:
        return {
            **OptimizerOptions.option_limits(self),
            "momentum": (0 <= self.momentum < 1, "from 0 up to but not 1"),
            "dampening": (0 <= self.dampening <= 1, "0 to 1"),
            "nesterov": (
                not self.nesterov or (self.momentum > 0 and not self.dampening),
                "0, or momentum without dampening",
            ),
        }


class SGDState(ElementwiseState):
    """One momentum per element."""

    options: SGDOptions

    def update_run(self, value: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], lr: float, count: int) -> None:
        options, momentum = self.options, moments["momentum"]
        direction = gradient.add(value, alpha=self.decay) if self.decay else gradient
        if count == 1:
            momentum.copy_(direction)
        else:
            momentum.mul_(options.momentum).add_(direction, alpha=1.0 - options.dampening)
        value.add_(direction.add(momentum, alpha=options.momentum) if options.nesterov else momentum, alpha=-lr)


SGD = register_optimizer(
    OptimizerKind(
        name="sgd",
        summary="SGD with momentum: one momentum per element",
        options=SGDOptions,
        state=SGDState,
        moments=("momentum",),
        temporaries=2,
    )
)
