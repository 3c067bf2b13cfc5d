"""AdamW: Loshchilov and Hutter (2019, decoupled weight decay), in the order of operations of `torch.optim.AdamW`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """Two moments per element. On a CPU, PyTorch's fused kernel updates them in one pass over memory."""

    options: AdamWOptions

    def run_elements(self, gradient: Tensor) -> int:
        fused = has_fused_kernel(gradient.device) and gradient.dtype == self.master.dtype
        return max(1, self.master.numel()) if fused else super().run_elements(gradient)

    def update_run(self, value: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], lr: float, count: int) -> None:
        options, first, second = self.options, moments["first"], moments["second"]
        if has_fused_kernel(value.device):
            fused_update(value, gradient, (first, second), (lr, self.decay, count), options)
            return
        if self.decay:
            value.mul_(1.0 - lr * self.decay)
        first.lerp_(gradient, 1.0 - options.beta1)
        second.mul_(options.beta2).addcmul_(gradient, gradient, value=1.0 - options.beta2)
        denominator = second.sqrt().div_(math.sqrt(1.0 - options.beta2**count)).add_(options.eps)
        value.addcdiv_(first, denominator, value=-lr / (1.0 - options.beta1**count))


VECTOR_ELEMENTS = 64
"""A multiple of the elements in the widest vector of a CPU, and in a line of its cache, where threads divide."""


def has_fused_kernel(device: Any) -> bool:
    """Return True if PyTorch's fused update runs on this device: a CPU. On CUDA it has not been measured here."""
    return bool(device.type == "cpu")


def fused_update(
    value: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    settings: tuple[float, float, int],
    options: AdamWOptions,
) -> None:
    """Update values and moments in place by the kernel of `torch.optim.AdamW(fused=True)`.

    All tensors are flat, of one size and type. `settings` are the learning rate, the weight decay and the number of
    updates, including this one. The kernel rounds the last elements of a tensor otherwise if they do not fill a
    vector. They are updated in a buffer of zeros, so the bits of an element depend on its own numbers alone: copies of
    a parameter stay equal, wherever their pieces begin.
    """
    import torch

    lr, decay, count = settings
    tensors = (value, gradient, *moments)
    complete = value.numel() // VECTOR_ELEMENTS * VECTOR_ELEMENTS
    parts = [tuple(tensor[:complete] for tensor in tensors)] if complete else []
    rest = value.numel() - complete
    if rest:
        buffers = tuple(tensor.new_zeros(VECTOR_ELEMENTS) for tensor in tensors)
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer[:rest] = tensor[complete:]
        parts.append(buffers)
    for part in parts:
        torch._fused_adamw_(
            [part[0]], [part[1]], [part[2]], [part[3]], [], [torch.tensor(float(count))], amsgrad=False, lr=lr,
            beta1=options.beta1, beta2=options.beta2, weight_decay=decay, eps=options.eps, maximize=False,
        )  # fmt: skip
    if rest:
        for buffer, tensor in zip(parts[-1], tensors, strict=True):
            tensor[complete:] = buffer[:rest]


ADAMW = register_optimizer(
    OptimizerKind(
        name="adamw",
        summary="AdamW: two moments per element",
        options=AdamWOptions,
        state=AdamWState,
        moments=("first", "second"),
    )
)
