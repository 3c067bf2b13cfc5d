"""Matrix products in FP8: each factor is scaled by its largest value, and the product is scaled back.

E4M3 holds activations and weights, E5M2 gradients, as in Transformer Engine's hybrid format and torchao's dynamic
tensor-wise scaling (Micikevicius et al. 2022, FP8 Formats for Deep Learning).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from pipefit.model.analysis.narrow_products import MULTIPLE

VALUE_TYPE, GRADIENT_TYPE = torch.float8_e4m3fn, torch.float8_e5m2


def scaled_product(
    left: torch.Tensor, right: torch.Tensor, left_type: torch.dtype = VALUE_TYPE, out_type: torch.dtype | None = None
) -> torch.Tensor:
    """Return left right^T with both factors in FP8. left: (M, K), right: (N, K) -> (M, N) in `out_type`, or in the type
    of `left`. K and N are multiples of 16."""
    quantize = find_quantizer(left.device.type)
    factor, scale = quantize(left, left_type)
    other_factor, other_scale = quantize(right, VALUE_TYPE)
    return multiply_factors(factor, other_factor, scale, other_scale, out_type or left.dtype)


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
    scale = values.detach().abs().amax().float().clamp(min=1e-12) / largest
    return (values.float() / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


@cache
def find_quantizer(device_type: str) -> Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]:
    """Return `quantize_factor`, compiled on CUDA: one kernel finds the largest value, another one scales and writes."""
    return torch.compile(quantize_factor, dynamic=True) if device_type == "cuda" else quantize_factor


def divides_evenly(*sizes: int) -> bool:
    """Return whether FP8 kernels take matrices of these sizes."""
    return all(size % MULTIPLE == 0 for size in sizes)


@cache
def has_scaled_product(device: torch.device) -> bool:
    """Return whether this device multiplies in FP8; tried once, on a small product of each kind."""
    values = torch.ones((MULTIPLE, MULTIPLE), dtype=torch.bfloat16, device=device)
    try:
        products = [scaled_product(values, values, kind) for kind in (VALUE_TYPE, GRADIENT_TYPE)]
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return all(bool((product == MULTIPLE).all()) for product in products)
