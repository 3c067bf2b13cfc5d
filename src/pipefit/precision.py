"""The precisions of a training job: number types of parameters, activations, gradients and optimizer state.

Mixed precision follows Megatron and torchtitan: `bfloat16` has float32 gradients, master weights and optimizer state.
`bfloat16-gradients` accumulates and reduces the gradients in bfloat16, as Megatron does without `--accumulate-
allreduce-grads-in-fp32`. `float16` is as `bfloat16`, with a loss that is scaled so that small gradients are no zeros
(`run/update/loss_scale.py`). `tf32` keeps everything in float32 and rounds the inputs of matrix products to TF32, where
the device has units for it. `fp8` is `bfloat16` with the linear layers of blocks in FP8
(`model/analysis/narrow_products.py`): each factor is scaled by its largest value when it is used.
`fp8-bfloat16-gradients` accumulates and reduces gradients in bfloat16, as NVIDIA's recipes do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Precision = Literal[
    "float64", "float32", "tf32", "float16", "bfloat16", "bfloat16-gradients", "fp8", "fp8-bfloat16-gradients"
]  # fmt: skip


class NumberTypes(NamedTuple):
    """Number types of a training job, as PyTorch names them."""

    product: str
    "Of matrix products; the peaks of a device have this name. `tf32` and `fp8` are no types of whole tensors."
    compute: str
    "Of parameters and activations."
    gradient: str
    "Of the buffer into which the gradients of all microbatches are accumulated, and in which they are reduced."
    state: str
    "Of the optimizer's state, and of the weights that it updates."


NUMBER_TYPES: Mapping[Precision, NumberTypes] = {
    "float64": NumberTypes("float64", "float64", "float64", "float64"),
    "float32": NumberTypes("float32", "float32", "float32", "float32"),
    "tf32": NumberTypes("tf32", "float32", "float32", "float32"),
    "float16": NumberTypes("float16", "float16", "float32", "float32"),
    "bfloat16": NumberTypes("bfloat16", "bfloat16", "float32", "float32"),
    "bfloat16-gradients": NumberTypes("bfloat16", "bfloat16", "bfloat16", "float32"),
    "fp8": NumberTypes("fp8", "bfloat16", "float32", "float32"),
    "fp8-bfloat16-gradients": NumberTypes("fp8", "bfloat16", "bfloat16", "float32"),
}

PRODUCT_TYPE: Mapping[Precision, str] = {precision: types.product for precision, types in NUMBER_TYPES.items()}
"""Type of matrix products: the peak of a device, and the curves of measured layers, have this name."""

COMPUTE_TYPE: Mapping[Precision, str] = {precision: types.compute for precision, types in NUMBER_TYPES.items()}
"""Type of parameters and activations."""

TENSOR_TYPE: Mapping[str, str] = {types.product: types.compute for types in NUMBER_TYPES.values()}
"""Type of the tensors around products, by the type of the products."""

NARROW: tuple[Precision, ...] = tuple(name for name, product in PRODUCT_TYPE.items() if product == "fp8")
"""Precisions that run some products in a narrower type than the activations."""
