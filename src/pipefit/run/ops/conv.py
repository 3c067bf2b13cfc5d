"""conv(x, weight, bias|'') {stride, padding, dilation, groups}, with a backward that may leave the weight's part for W.

Shapes: x (B, I, spatial...), weight (O, I/groups, kernel...), bias (O,), y (B, O, spatial...). As `linear` does, the
gradients of weight and bias go into their bound buffers: at once in a fused backward, or from the record's queue.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pipefit.model.graph import Operator
from pipefit.run.ops import Context, Step
from pipefit.run.stage_record import Deferred, Record


class Window(NamedTuple):
    """How the kernel goes over the image."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def backward(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: list[bool]) -> Any:
        """Gradients of x, weight and bias, those that are wanted."""
        return torch.ops.aten.convolution_backward(
            dy,
            x,
            weight,
            [weight.shape[0]],
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.stride),
            self.groups,
            wanted,
        )


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, window: Window, record: Record, layer: int
    ) -> torch.Tensor:
        ctx.weight, ctx.bias, ctx.window, ctx.record, ctx.layer = weight, bias, window, record, layer
        ctx.trains = weight.requires_grad or (bias is not None and bias.requires_grad)
        ctx.like = x.detach() if not ctx.trains else None
        ctx.save_for_backward(x if ctx.trains else None)
        stride, padding, dilation, groups = window
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        weight, bias, window = ctx.weight, ctx.bias, ctx.window
        x = ctx.like
        if ctx.trains:
            (x,) = ctx.saved_tensors
            deferred = ctx.record.deferred
            if deferred is None:
                accumulate_conv(weight, bias, x, dy, window)
            else:
                deferred.append(Deferred(ctx.layer, accumulate_conv, (weight, bias, x.detach(), dy, window)))
        dx = window.backward(dy, x, weight, [True, False, False])[0] if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


def accumulate_conv(weight: Any, bias: Any, x: torch.Tensor, dy: torch.Tensor, window: Window) -> None:
    """Add the gradients of a convolution's weight and bias to their buffers."""
    if weight.requires_grad:
        weight.main_grad.add_(window.backward(dy, x, weight, [False, True, False])[1])
    if bias is not None and bias.requires_grad:
        dims = [dim for dim in range(dy.dim()) if dim != 1]
        bias.main_grad.add_(dy.sum(dims, dtype=bias.main_grad.dtype))


def build(operator: Operator, context: Context) -> Step:
    layer, apply, at = context.layer, _Conv.apply, operator.attributes
    window = Window(tuple(at["stride"]), tuple(at["padding"]), tuple(at["dilation"]), int(at["groups"]))

    def conv(record: Record, x: Any, weight: Any, bias: Any) -> Any:
        return apply(x, weight, bias, window, record, layer)

    return Step(conv, wants_record=True)


BUILDERS = {"conv": build}
