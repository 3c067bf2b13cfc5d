"""conv(x, weight, bias|'') {stride, padding, dilation, groups}, and conv_transpose, which also has an output_padding.

Shapes: x (B, I, spatial...), weight (O, I/groups, kernel...), bias (O,), y (B, O, spatial...); transposed, the weight
is (I, O/groups, kernel...). As for `linear`, the gradients of weight and bias go into their bound buffers: at once in a
fused backward, or from the record's queue when W runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pipefit.model.graph import Operator
from pipefit.run.autograd.saved_forward import DeferredGradient, SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.sharded.weights import add_gradient, leaf_parameter, whole_weight


class ConvWindow(NamedTuple):
    """Stride, padding, dilation and groups of a convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]

    def run_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the convolution."""
        stride, padding, dilation, groups, transposed, behind = self
        return torch.convolution(x, weight, bias, stride, padding, dilation, transposed, behind, groups)

    def run_backward(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool]) -> Any:
        """Return the gradients of x, weight and bias, None for those not `wanted`."""
        return torch.ops.aten.convolution_backward(
            dy,
            x,
            weight,
            [dy.shape[1]],
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            wanted,
        )


class _ConvFunction(torch.autograd.Function):
    """Convolution with parameters passed twice, as leaves for autograd and as handles. A parameter stored sharded is
    gathered here, and again for the input gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        leaf: Any,
        bias_leaf: Any,
        weight: Any,
        bias: Any,
        window: ConvWindow,
        record: SavedForward,
        layer: int,
    ) -> torch.Tensor:
        ctx.weight, ctx.bias, ctx.window, ctx.record, ctx.layer = weight, bias, window, record, layer
        ctx.save_for_backward(x)
        return window.run_forward(x, whole_weight(weight), whole_weight(bias))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        weight, bias, window = ctx.weight, ctx.bias, ctx.window
        (x,) = ctx.saved_tensors
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            deferred = ctx.record.deferred
            if deferred is None:
                accumulate_conv(weight, bias, x, dy, window)
            else:
                deferred.append(DeferredGradient(ctx.layer, accumulate_conv, (weight, bias, x.detach(), dy, window)))
        dx = (
            window.run_backward(dy, x, whole_weight(weight), [True, False, False])[0]
            if ctx.needs_input_grad[0]
            else None
        )
        return dx, None, None, None, None, None, None, None


def accumulate_conv(weight: Any, bias: Any, x: torch.Tensor, dy: torch.Tensor, window: ConvWindow) -> None:
    """Add the gradients of a convolution's weight and bias to their buffers."""

    def add_conv_gradient(buffer: torch.Tensor) -> None:
        like = dy.new_empty(()).expand(buffer.shape)  # only the shape of the weight is read
        buffer.add_(window.run_backward(dy, x, like, [False, True, False])[1])

    if weight.requires_grad:
        add_gradient(weight, add_conv_gradient)
    if bias is not None and bias.requires_grad:
        dims = [dim for dim in range(dy.dim()) if dim != 1]
        add_gradient(bias, lambda buffer: buffer.add_(dy.sum(dims, dtype=buffer.dtype)))


def build_conv(operator: Operator, context: OperatorContext) -> OperatorStep:
    layer, apply, attributes = context.layer, _ConvFunction.apply, operator.attributes
    transposed = operator.kind == "conv_transpose"
    behind = attributes["output_padding"] if transposed else [0] * len(attributes["stride"])
    sizes = (tuple(attributes[name]) for name in ("stride", "padding", "dilation"))
    window = ConvWindow(*sizes, int(attributes["groups"]), transposed, tuple(behind))

    def run_conv(record: SavedForward, x: Any, weight: Any, bias: Any) -> Any:
        return apply(x, leaf_parameter(weight), leaf_parameter(bias), weight, bias, window, record, layer)

    return OperatorStep(run_conv, wants_record=True)


BUILDERS = {"conv": build_conv, "conv_transpose": build_conv}
