"""rms_norm(x, weight|'') and layer_norm(x, weight|'', bias|'') {eps}, over the last dimension.

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
    def forward(ctx: Any, x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.weight = weight
        ctx.save_for_backward(x, scale)
        y = (wide * scale).to(x.dtype)
        return y if weight is None else y * weight

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
                wide = wide * weight
            inner = (wide * normal).mean(-1, keepdim=True)
            dx = (wide - normal * inner).mul_(scale).to(x.dtype)
        return dx, dweight, None


def build_rms_norm(operator: Operator, context: OperatorContext) -> OperatorStep:
    eps = float(operator.attributes["eps"])
    apply = _RmsNorm.apply

    def plain_rms_norm(x: torch.Tensor, weight: Any = None) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    if context.device.type == "cuda":
        return OperatorStep(plain_rms_norm)
    return OperatorStep(lambda x, weight=None: apply(x, weight, eps), traced=plain_rms_norm)


def build_layer_norm(operator: Operator, context: OperatorContext) -> OperatorStep:
    eps = float(operator.attributes["eps"])
    return OperatorStep(lambda x, weight=None, bias=None: functional.layer_norm(x, (x.shape[-1],), weight, bias, eps))


BUILDERS = {"rms_norm": build_rms_norm, "layer_norm": build_layer_norm}
