"""rms_norm(x, weight|'') {eps, offset} and layer_norm(x, weight|'', bias|'') {eps}, over the last dimension.

They save x and one or two numbers per row, computed in float32 or wider; so do PyTorch's fused kernels, used on CUDA.
Shapes: x (..., D), weight and bias (D,).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pipefit.model.graph import Operator
from pipefit.run.ops import OperatorContext, OperatorStep


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, eps: float, offset: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.weight, ctx.offset = weight, offset
        ctx.save_for_backward(x, scale)
        return scale_normal(wide * scale, weight, offset, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        weight = ctx.weight
        normal = x.to(scale.dtype) * scale
        wide = dy.to(scale.dtype)
        dweight = dx = None
        if weight is not None and ctx.needs_input_grad[1]:
            dweight = (wide * normal).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            if weight is not None:
                wide = wide * add_offset(weight, ctx.offset, wide.dtype)
            inner = (wide * normal).mean(-1, keepdim=True)
            dx = (wide - normal * inner).mul_(scale).to(x.dtype)
        return dx, dweight, None, None


def add_offset(weight: Any, offset: float, wide: torch.dtype) -> Any:
    """Return offset + weight in the wide type, since small weights beside an offset of 1 would be rounded; the weight
    itself without an offset."""
    return weight.to(wide) + offset if offset else weight


def scale_normal(normal: torch.Tensor, weight: Any, offset: float, dtype: torch.dtype) -> torch.Tensor:
    """Return normalised features (wide) times offset + weight, in `dtype`."""
    if weight is None or not offset:
        y = normal.to(dtype)
        return y if weight is None else y * weight
    return (normal * add_offset(weight, offset, normal.dtype)).to(dtype)


def build_rms_norm(operator: Operator, context: OperatorContext) -> OperatorStep:
    eps, offset = float(operator.attributes["eps"]), float(operator.attributes.get("offset", 0.0))
    apply = _RmsNorm.apply

    def plain_rms_norm(x: torch.Tensor, weight: Any = None) -> torch.Tensor:
        if weight is None or not offset:
            return functional.rms_norm(x, (x.shape[-1],), weight, eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        return functional.rms_norm(x.to(wide), (x.shape[-1],), add_offset(weight, offset, wide), eps).to(x.dtype)

    if context.device.type == "cuda":
        return OperatorStep(plain_rms_norm)
    return OperatorStep(lambda x, weight=None: apply(x, weight, eps, offset), traced=plain_rms_norm)


def build_layer_norm(operator: Operator, context: OperatorContext) -> OperatorStep:
    eps = float(operator.attributes["eps"])
    return OperatorStep(lambda x, weight=None, bias=None: functional.layer_norm(x, (x.shape[-1],), weight, bias, eps))


BUILDERS = {"rms_norm": build_rms_norm, "layer_norm": build_layer_norm}
