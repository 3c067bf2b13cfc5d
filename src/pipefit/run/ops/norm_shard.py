"""rms_norm_shard {eps, offset, whole}, layer_norm_shard {eps, whole}, softmax_shard {dim}: the normalised dimension is
split over the shards.

Only per-token statistics are reduced. The root mean square needs one sum. A layer norm sums the features, then their
squared distances from the mean: two reductions, because this order loses no digits. A softmax needs the largest number
and the sum of exponentials. The backward needs one, two and one reductions. Shapes: x (..., d) with d of `whole`
features, weight and bias (d,). Statistics of norms are float32 or wider.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.norm import add_offset, scale_normal
from pipefit.run.sharded.internal_collectives import reduce_in_place
from pipefit.run.sharded.parts import ShardContext


class _RmsNormShard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, eps: float, offset: float, whole: int, shard: ShardContext
    ) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = reduce_in_place(wide.square().sum(-1, keepdim=True), shard).div_(whole).add_(eps).rsqrt_()
        ctx.weight, ctx.offset, ctx.whole, ctx.shard = weight, offset, whole, shard
        ctx.save_for_backward(x, scale)
        return scale_normal(wide * scale, weight, offset, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        normal, wide = x.to(scale.dtype) * scale, dy.to(scale.dtype)
        dweight, dx = _token_sum(ctx, 1, wide * normal), None
        if ctx.needs_input_grad[0]:
            wide = wide if ctx.weight is None else wide * add_offset(ctx.weight, ctx.offset, wide.dtype)
            inner = reduce_in_place((wide * normal).sum(-1, keepdim=True), ctx.shard).div_(ctx.whole)
            dx = (wide - normal * inner).mul_(scale).to(x.dtype)
        return dx, dweight, None, None, None, None


class _LayerNormShard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, whole: int, shard: ShardContext
    ) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = reduce_in_place(wide.sum(-1, keepdim=True), shard).div_(whole)
        centred = wide - mean
        scale = reduce_in_place(centred.square().sum(-1, keepdim=True), shard).div_(whole).add_(eps).rsqrt_()
        ctx.weight, ctx.whole, ctx.shard = weight, whole, shard
        ctx.save_for_backward(x, mean, scale)
        y = centred.mul_(scale)
        if weight is not None:
            y = y * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, mean, scale = ctx.saved_tensors
        normal, wide = (x.to(scale.dtype) - mean).mul_(scale), dy.to(scale.dtype)
        dweight, dbias, dx = _token_sum(ctx, 1, wide * normal), _token_sum(ctx, 2, wide), None
        if ctx.needs_input_grad[0]:
            wide = wide if ctx.weight is None else wide * ctx.weight
            sums = torch.stack((wide.sum(-1, keepdim=True), (wide * normal).sum(-1, keepdim=True)))
            both, inner = reduce_in_place(sums, ctx.shard).div_(ctx.whole)
            dx = (wide - both - normal * inner).mul_(scale).to(x.dtype)
        return dx, dweight, dbias, None, None, None


def _token_sum(ctx: Any, place: int, each: torch.Tensor) -> Any:
    """Return the gradient of a scale or shift, input number `place`, or None if not needed: the sum over all tokens."""
    return each.flatten(0, -2).sum(0).to(ctx.saved_tensors[0].dtype) if ctx.needs_input_grad[place] else None


class _SoftmaxShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, shard: ShardContext) -> torch.Tensor:
        y = (x - reduce_in_place(x.amax(dim, keepdim=True), shard, "max")).exp_()
        y.div_(reduce_in_place(y.sum(dim, keepdim=True), shard))
        ctx.dim, ctx.shard = dim, shard
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        dx = dy * y
        return dx.addcmul_(y, reduce_in_place(dx.sum(ctx.dim, keepdim=True), ctx.shard), value=-1), None, None


def _read_operator(operator: Operator, context: OperatorContext) -> tuple[float, int, ShardContext]:
    assert context.shard is not None, f"{operator.kind} in a stage without a shard axis"
    return float(operator.attributes["eps"]), int(operator.attributes["whole"]), context.shard


def build_rms_norm(operator: Operator, context: OperatorContext) -> OperatorStep:
    eps, features, shard = _read_operator(operator, context)
    offset = float(operator.attributes.get("offset", 0.0))
    apply = _RmsNormShard.apply
    return OperatorStep(lambda x, weight=None: apply(x, weight, eps, offset, features, shard))


def build_layer_norm(operator: Operator, context: OperatorContext) -> OperatorStep:
    eps, features, shard = _read_operator(operator, context)
    apply = _LayerNormShard.apply
    return OperatorStep(lambda x, weight=None, bias=None: apply(x, weight, bias, eps, features, shard))


def build_softmax(operator: Operator, context: OperatorContext) -> OperatorStep:
    dim, shard = int(operator.attributes["dim"]), context.shard
    assert shard is not None, "softmax_shard in a stage without a shard axis"
    apply = _SoftmaxShard.apply
    return OperatorStep(lambda x: apply(x, dim, shard))


BUILDERS = {
    "rms_norm_shard": build_rms_norm,
    "layer_norm_shard": build_layer_norm,
    "softmax_shard": build_softmax,
}
