"""rotary(x, positions) {theta, dim, scaling, style, cut}: rotate pairs of the first `dim` features of every head.

x (B, T, H, K), positions (B, T). The cos/sin table is made once per (microbatch, slice) in float32 or wider and shared
by all layers through the record. Nothing else is saved: the backward rotates in the opposite direction. A shard program
writes `cut`: the rows or tokens on this device.

With `axes`, positions are a data input (B, T, A), and each pair reads one of the A. With `merge`, they are a grid of
squares, and x is (B, T, M, H, K).
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.codec import content_digest
from pipefit.model.graph import Graph, Operator
from pipefit.model.ops.rotary import TABLE_ATTRIBUTES, rotary_frequencies
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.image_positions import patch_grid


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + dim/2): x * cos + rotate_half(x) * sin, with cos and sin (B, T, M?, 1, dim/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (2i, 2i + 1), with cos and sin of the same shape."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


ROTATIONS = {"half": rotate_half, "interleaved": rotate_interleaved}


class _RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Any, dim: int) -> torch.Tensor:
        ctx.cos, ctx.sin, ctx.turn, ctx.dim = cos, sin, turn, dim
        return _rotate_front(x, cos, sin, turn, dim)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _rotate_front(dy, ctx.cos, -ctx.sin, ctx.turn, ctx.dim), None, None, None, None


def _rotate_front(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Any, dim: int) -> torch.Tensor:
    if dim == x.shape[-1]:
        return turn(x, cos, sin)
    return torch.cat((turn(x[..., :dim], cos, sin), x[..., dim:]), -1)


def build_rotary(operator: Operator, context: OperatorContext) -> OperatorStep:
    attributes = operator.attributes
    dim = int(attributes["dim"])
    turn = ROTATIONS[attributes.get("style", "half")]
    wide = torch.promote_types(context.dtype, torch.float32)
    values, factor = rotary_frequencies(attributes)
    frequency = torch.tensor(values, dtype=wide, device=context.device)
    key = ("rotary", content_digest({name: attributes[name] for name in TABLE_ATTRIBUTES if name in attributes}))
    axes = torch.tensor(attributes["axes"], device=context.device) if "axes" in attributes else None
    source = "" if axes is None else _source_name(context.graph, operator.inputs[1])
    merge = int(attributes.get("merge", 1))
    dtype, shard = context.dtype, context.shard
    side = attributes.get("cut", (-1,))[0]
    apply = _RotaryFunction.apply

    def token_angles(record: SavedForward) -> torch.Tensor:
        """Return (B, T, dim/2), or (B, T, M, dim/2)."""
        if axes is None:
            return record.feed.positions.to(wide).unsqueeze(-1) * frequency
        places = record.feed.data[source]
        if merge > 1:
            places = patch_grid(places, merge).unflatten(1, (-1, merge * merge))
        return places.index_select(-1, axes).to(wide) * frequency

    def prepare_angles(record: SavedForward) -> tuple[torch.Tensor, torch.Tensor]:
        table = record.cache.get(key)
        if table is None:
            angle = token_angles(record).unsqueeze(-2)
            table = record.cache[key] = ((angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype))
        if side < 0:
            return table
        start, stop = shard.runs(table[0].shape[side])[shard.position]
        cos, sin = table
        return cos.narrow(side, start, stop - start), sin.narrow(side, start, stop - start)

    return OperatorStep(
        lambda x, positions, cos, sin: apply(x, cos, sin, turn, dim),
        prepare=prepare_angles,
        traced=lambda x, positions, cos, sin: _rotate_front(x, cos, sin, turn, dim),
    )


def _source_name(graph: Graph, name: str) -> str:
    """Return the name of the graph input that this value is, or is a part of."""
    producers = {operator.outputs[0]: operator for operator in graph.operators}
    while name in producers:
        name = producers[name].inputs[0]
    return name


BUILDERS = {"rotary": build_rotary}
