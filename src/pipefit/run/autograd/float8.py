"""Matrix products in FP8: each factor is scaled by its largest value, and the product is scaled back.

E4M3 holds activations and weights, E5M2 gradients, as in Transformer Engine's hybrid format and torchao's dynamic
tensor-wise scaling (Micikevicius et al. 2022, FP8 Formats for Deep Learning).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional

from pipefit.model.analysis.narrow_products import MULTIPLE

Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function that returns a factor in FP8 and its scale."""


class Float8Types(NamedTuple):
    """The FP8 types of a device."""

    value: torch.dtype
    "Of activations and weights."
    gradient: torch.dtype
    "Of the gradients of outputs."


def scaled_product(
    left: torch.Tensor, right: torch.Tensor, out_type: torch.dtype | None = None, gradient: bool = False
) -> torch.Tensor:
    """Return left right^T with both factors in FP8. left: (M, K), right: (N, K) -> (M, N) in `out_type`, or in the type
    of `left`. K and N are multiples of 16. `gradient`: the left factor is one."""
    out_type = out_type or left.dtype
    if not left.numel():
        return torch.zeros((left.shape[0], right.shape[0]), dtype=out_type, device=left.device)
    types = float8_types(left.device)
    factor, scale = find_quantizer(left.device.type, types.gradient if gradient else types.value)(left.detach())
    other_factor, other_scale = find_quantizer(right.device.type, types.value)(right.detach())
    return multiply_factors(factor, other_factor, scale, other_scale, out_type)


def multiply_factors(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scale: torch.Tensor,
    right_scale: torch.Tensor,
    out_type: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return (left_scale left) (right_scale right)^T of factors in FP8, both contiguous."""
    return torch._scaled_mm(left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=out_type)


def quantize_factor(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values / scale in FP8, contiguous; scale, a float32 scalar): the largest value becomes the largest of the
    type."""
    largest = torch.finfo(dtype).max
    scale = values.abs().amax().float().clamp(min=1e-12) / largest
    return (values.float() / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


@cache
def find_quantizer(device_type: str, dtype: torch.dtype) -> Quantizer:
    """Return `quantize_factor` to a type, compiled on CUDA: one kernel finds the largest value, another one scales and
    writes."""

    def quantize_values(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_factor(values, dtype)

    return torch.compile(quantize_values, dynamic=True) if device_type == "cuda" else quantize_values


@cache
def float8_types(device: torch.device) -> Float8Types:
    """Return the FP8 types of a device: AMD's MI300 series has its own."""
    if device.type == "cuda" and torch.version.hip:
        architecture = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
        if architecture.startswith("gfx94"):
            return Float8Types(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    return Float8Types(torch.float8_e4m3fn, torch.float8_e5m2)


def pad_rows(values: torch.Tensor) -> torch.Tensor:
    """Return (M, K) values with rows of zeros up to a multiple of 16: the sum over rows in a weight gradient is the
    same."""
    missing = -values.shape[0] % MULTIPLE
    return functional.pad(values, (0, 0, 0, missing)) if missing else values


@cache
def has_scaled_product(device: torch.device) -> bool:
    """Return whether this device multiplies in FP8; tried once, on a small product of each kind."""
    values = torch.ones((MULTIPLE, MULTIPLE), dtype=torch.bfloat16, device=device)
    types = float8_types(device)
    right = quantize_factor(values, types.value)
    products = []
    for dtype in types:
        factor, scale = quantize_factor(values, dtype)
        try:
            products.append(multiply_factors(factor, right[0], scale, right[1]))
        except RuntimeError:
            return False
    return all(bool((product == MULTIPLE).all()) for product in products)
