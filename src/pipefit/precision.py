"""The precisions of a training job: number types of parameters, activations, gradients and optimizer state.

Mixed precision follows Megatron and torchtitan: `bfloat16` has float32 gradients, master weights and optimizer state.
`bfloat16-gradients` accumulates and reduces the gradients in bfloat16, as Megatron does without
`--accumulate-allreduce-grads-in-fp32`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Precision = Literal["float64", "float32", "bfloat16", "bfloat16-gradients"]

COMPUTE_TYPE: Mapping[Precision, str] = {
    "float64": "float64",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "bfloat16-gradients": "bfloat16",
}
"""Type of parameters and activations, as PyTorch and the peaks of a device name it."""

GRADIENT_TYPE: Mapping[Precision, str] = {
    "float64": "float64",
    "float32": "float32",
    "bfloat16": "float32",
    "bfloat16-gradients": "bfloat16",
}
"""Type of the gradient buffer into which all microbatches are accumulated, and in which it is reduced."""

STATE_TYPE: Mapping[Precision, str] = {
    "float64": "float64",
    "float32": "float32",
    "bfloat16": "float32",
    "bfloat16-gradients": "float32",
}
"""Type of the optimizer's state, and of the weights that it updates."""
