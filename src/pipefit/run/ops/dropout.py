"""dropout(x) {p, index, by, cut}: zeros by a mask that depends on the element's identity, not on the device.

x (B, T, ...). See `pipefit.run.autograd.random`. Off in evaluation. A shard program writes `cut`: the part of the full
tensor on this device. With `by` rows (captured modules whose token dimension is unknown) the key counts the row and the
element's position within it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.run.autograd.random import feature_bits, keep_mask, mix_key, numbered_feature_bits, token_bits
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep


class _DropoutFunction(torch.autograd.Function):
    """Dropout that saves no mask: the backward draws it again from the keys of the tokens (B, T)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor, p: float) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.features, ctx.p = features, p
        return apply_dropout(x, tokens, features, p)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return apply_dropout(dy, *ctx.saved_tensors, ctx.features, ctx.p), None, None, None


def apply_dropout(x: torch.Tensor, tokens: torch.Tensor | None, features: torch.Tensor, p: float) -> torch.Tensor:
    """Return x with dropped elements zeroed and the rest divided by 1 - p; x itself if there are no keys
    (evaluation)."""
    if tokens is None:
        return x
    return x * keep_mask(tokens, features, p).view(x.shape) * (1.0 / (1.0 - p) if p < 1 else 0.0)


def build_dropout(operator: Operator, context: OperatorContext) -> OperatorStep:
    if operator.attributes.get("by") == "rows":
        return build_by_rows(operator, context)
    p = float(operator.attributes["p"])
    index = int(operator.attributes.get("index", context.operator))
    dim, first, _ = operator.attributes.get("cut", (0, 0, 0))
    trailing = [int(size) for size in context.graph.find_tensor(operator.outputs[0]).shape[2:]]
    features = feature_bits(first * math.prod(trailing[1:]) if dim >= 2 else 0, math.prod(trailing), context.device)
    assert dim <= 2, "only the first feature dimension can be split"
    shard, seed, layer = context.shard, context.seed, context.model_layer
    apply = _DropoutFunction.apply

    def prepare_keys(record: SavedForward) -> tuple[Any, ...]:
        if not record.train or p == 0:
            return (None,)
        feed = record.feed
        assert feed.rows is not None and feed.positions is not None, "dropout needs the feed's rows and positions"
        rows, positions = feed.rows, feed.positions
        if first < 0:
            start, stop = shard.runs(positions.shape[dim])[shard.position]
            positions = positions.narrow(dim, start, stop - start)
            rows = rows[start:stop] if dim == 0 else rows
        return (token_bits(mix_key(seed, feed.step, layer, index), rows, positions),)

    def run_dropout(x: torch.Tensor, tokens: torch.Tensor | None) -> Any:
        return x if tokens is None else apply(x, tokens, features, p)

    return OperatorStep(
        run_dropout, prepare=prepare_keys, traced=lambda x, tokens: apply_dropout(x, tokens, features, p)
    )


def build_by_rows(operator: Operator, context: OperatorContext) -> OperatorStep:
    """Build dropout over x (B, ...): full rows, or a part of them along any dimension."""
    p, index = float(operator.attributes["p"]), int(operator.attributes["index"])
    dim, first, total = operator.attributes.get("cut", (0, 0, 0))
    sizes = [int(size) for size in context.graph.find_tensor(operator.outputs[0]).shape[1:]]
    full_shape = [int(total) if axis == dim - 1 else size for axis, size in enumerate(sizes)]
    places = torch.arange(math.prod(full_shape), device=context.device).view(full_shape)
    if dim:
        places = places.narrow(dim - 1, first, sizes[dim - 1])
    features = numbered_feature_bits(places.reshape(-1))
    shard, seed, layer = context.shard, context.seed, context.model_layer

    def prepare_keys(record: SavedForward) -> tuple[Any, ...]:
        if not record.train or p == 0:
            return (None,)
        rows = record.feed.rows
        assert rows is not None, "dropout needs the feed's rows"
        if first < 0:
            start, stop = shard.runs(rows.shape[0])[shard.position]
            rows = rows[start:stop]
        return (token_bits(mix_key(seed, record.feed.step, layer, index), rows, rows.new_zeros((len(rows), 1))),)

    def run_dropout(x: torch.Tensor, tokens: torch.Tensor | None) -> Any:
        return x if tokens is None else _DropoutFunction.apply(x, tokens, features, p)

    return OperatorStep(
        run_dropout, prepare=prepare_keys, traced=lambda x, tokens: apply_dropout(x, tokens, features, p)
    )


BUILDERS = {"dropout": build_dropout}
