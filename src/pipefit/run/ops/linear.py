"""linear(x, weight, bias|''): y = x W^T + b, with a backward that may defer the weight gradient.

The backward computes the input gradient at once. The gradients of weight and bias go straight into their bound buffers
(`parameter.main_grad`): at once in a fused backward (B), or from the record's queue when W runs. No part of the graph
runs twice; W holds only x and dy. Shapes: x (..., I), weight (O, I), bias (O,), y (..., O).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

from pipefit.model.analysis.narrow_products import has_narrow_product
from pipefit.model.graph import Operator
from pipefit.run.autograd.float8 import pad_rows, scaled_product
from pipefit.run.autograd.saved_forward import DeferredGradient, SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.sharded.weights import add_gradient, leaf_parameter, whole_weight

Accumulate = Callable[[Any, Any, torch.Tensor, torch.Tensor], None]
"""(weight, bias, x, dy) -> None: adds the gradients of the trainable parameters to their buffers."""


class _LinearFunction(torch.autograd.Function):
    """Linear layer with parameters passed twice: `leaf` and `bias_leaf` for autograd, `handles` (weight, bias) for the
    operator. A weight stored sharded is gathered here, and again for the input gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        leaf: Any,
        bias_leaf: Any,
        handles: Any,
        record: SavedForward,
        layer: int,
        accumulate: Any,
        narrow: bool,
    ) -> torch.Tensor:
        ctx.handles, ctx.record, ctx.layer, ctx.accumulate, ctx.narrow = handles, record, layer, accumulate, narrow
        weight, bias = handles
        ctx.trains = weight.requires_grad or (bias is not None and bias.requires_grad)
        ctx.save_for_backward(x if ctx.trains else None)
        if not narrow:
            return functional.linear(x, whole_weight(weight), whole_weight(bias))
        y = scaled_product(x.reshape(-1, x.shape[-1]), whole_weight(weight))
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + whole_weight(bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        weight, bias = ctx.handles
        if ctx.trains:
            (x,) = ctx.saved_tensors
            deferred = ctx.record.deferred
            if deferred is None:
                ctx.accumulate(weight, bias, x, dy)
            else:
                deferred.append(DeferredGradient(ctx.layer, ctx.accumulate, (weight, bias, x.detach(), dy)))
        dx = input_gradient(dy, whole_weight(weight), ctx.narrow) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None, None, None


def input_gradient(dy: torch.Tensor, weight: torch.Tensor, narrow: bool) -> torch.Tensor:
    """Return dy weight, in FP8 if `narrow`."""
    if not narrow:
        return dy @ weight
    flat = dy.reshape(-1, dy.shape[-1])
    return scaled_product(flat, weight.t(), gradient=True).reshape(*dy.shape[:-1], weight.shape[1])


def accumulate_linear(weight: Any, bias: Any, x: torch.Tensor, dy: torch.Tensor, narrow: bool = False) -> None:
    """Add the gradients of a linear layer's weight (dy^T x, in FP8 if `narrow`) and bias (sum of dy) to their
    buffers."""
    dy, add = dy.reshape(-1, dy.shape[-1]), add_narrow_product if narrow else add_product
    if weight.requires_grad:
        add_gradient(weight, lambda buffer: add(buffer, dy.t(), x.reshape(-1, x.shape[-1])))
    if bias is not None and bias.requires_grad:
        add_gradient(bias, lambda buffer: buffer.add_(dy.sum(0, dtype=buffer.dtype)))


def apply_linear(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    record: SavedForward,
    layer: int,
    accumulate: Accumulate = accumulate_linear,
    narrow: bool = False,
) -> Any:
    """Return x weight^T + bias. Parameters may be stored sharded; `accumulate` adds their gradients to the buffers.
    `narrow`: the products of the forward and of the input gradient run in FP8."""
    return _LinearFunction.apply(
        x, leaf_parameter(weight), leaf_parameter(bias), (weight, bias), record, layer, accumulate, narrow
    )


def add_product(buffer: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """buffer += a @ b, without rounding the product to the dtype of a and b if the buffer is wider."""
    if buffer.dtype == a.dtype:
        buffer.addmm_(a, b)
    elif a.is_cuda and has_wide_product(a.device, a.dtype):
        torch.addmm(buffer, a, b, out_dtype=buffer.dtype, out=buffer)
    elif a.is_cuda:
        buffer.add_(a @ b)
    else:
        buffer.addmm_(a.to(buffer.dtype), b.to(buffer.dtype))


def add_narrow_product(buffer: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """buffer += a @ b in FP8, for a gradient a: (N, M) and values b: (M, K), of any number of rows M."""
    buffer.add_(scaled_product(pad_rows(a.t()).t(), pad_rows(b).t(), torch.float32, gradient=True))


@cache
def has_wide_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if this device multiplies `dtype` into a float32 sum in one kernel; tried once, on a small
    product."""
    a, buffer = torch.ones((16, 16), dtype=dtype, device=device), torch.zeros((16, 16), device=device)
    try:
        torch.addmm(buffer, a, a, out_dtype=buffer.dtype, out=buffer)
    except (RuntimeError, TypeError):
        return False
    return bool((buffer == 16).all())


def runs_narrow(operator: Operator, context: OperatorContext) -> bool:
    """Return whether the products of an operator run in FP8."""
    return context.products == "fp8" and has_narrow_product(context.graph, operator)


def build_linear(operator: Operator, context: OperatorContext) -> OperatorStep:
    layer = context.layer
    narrow = runs_narrow(operator, context)
    accumulate = partial(accumulate_linear, narrow=narrow)
    return OperatorStep(
        lambda record, x, weight, bias: apply_linear(x, weight, bias, record, layer, accumulate, narrow),
        wants_record=True,
    )


BUILDERS = {"linear": build_linear}
