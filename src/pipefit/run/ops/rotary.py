"""rotary(x, positions) {theta, dim, scaling, style, cut}: rotate pairs of the first `dim` features of every head.

x (B, T, H, K), positions (B, T). The cos/sin table is made once per (microbatch, slice) in float32 or wider and shared
by all layers through the record. Nothing else is saved: the backward rotates in the opposite direction. A shard program
writes `cut`: the rows or tokens on this device.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.codec import content_digest
from pipefit.model.graph import Operator
from pipefit.model.ops.rotary import rotary_frequencies
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + dim/2): x * cos + rotate_half(x) * sin, with cos and sin (B, T, 1, dim/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (2i, 2i + 1), with cos and sin (B, T, 1, dim/2)."""
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
    key = (
        "rotary",
        content_digest({name: attributes[name] for name in ("theta", "dim", "scaling") if name in attributes}),
    )
    dtype, shard = context.dtype, context.shard
    side = attributes.get("cut", (-1,))[0]
    apply = _RotaryFunction.apply

    def prepare_angles(record: SavedForward) -> tuple[torch.Tensor, torch.Tensor]:
        table = record.cache.get(key)
        if table is None:
            angle = (record.feed.positions.to(wide).unsqueeze(-1) * frequency).unsqueeze(2)
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


BUILDERS = {"rotary": build_rotary}
