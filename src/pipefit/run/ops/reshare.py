"""reshare(x) {dim, whole, from, to}: a dimension that is split by some shares is split by others afterwards.

Everyone sends everyone what both have of it, in one all-to-all with split sizes; parts that stay do not leave the
device. `units` says that the dimension is cut in fewer units than it is long.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.lab.pace import exchanged
from pipefit.layout import overlaps, split
from pipefit.model.graph import Operator
from pipefit.model.ops.reshare import shares_of
from pipefit.run.autograd.saved_forward import Record
from pipefit.run.ops import Context, Step
from pipefit.run.ops.shape import late_size
from pipefit.run.sharded.parts import ShardContext, require_part
from pipefit.run.transfers import comms

Counts = list[list[int]]
"""[device][device]: how much of the dimension goes from one to the other."""


class _Reshare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Counts, dim: int, shard: ShardContext) -> torch.Tensor:
        ctx.counts, ctx.dim, ctx.shard = counts, dim, shard
        return _exchange(x, counts, dim, shard)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        back = [list(column) for column in zip(*ctx.counts, strict=True)]
        return _exchange(dy, back, ctx.dim, ctx.shard), None, None, None


def _exchange(x: torch.Tensor, counts: Counts, dim: int, shard: ShardContext) -> torch.Tensor:
    moved = x.movedim(dim, 0).contiguous()
    sent, received = counts[shard.position], [row[shard.position] for row in counts]
    out = moved.new_empty((sum(received), *moved.shape[1:]))
    exchanged(lambda: comms.exchange(out, moved, received, sent, shard.group))
    return out.movedim(0, dim).contiguous()


def build(operator: Operator, context: Context) -> Step:
    shard = context.shard
    assert shard is not None, "a collective in a stage without a shard axis"
    dim, units = int(operator.attributes["dim"]), int(operator.attributes.get("units", 0))
    total, (old, new) = late_size(operator.attributes["whole"], shard), shares_of(operator)

    def reshare(record: Record, x: torch.Tensor) -> Any:
        length = total(record)
        runs, targets = (split(length, shares, length // units if units else 1) for shares in (old, new))
        require_part(x, dim, runs, shard, "reshare")
        counts = [[int(size) for size in row] for row in overlaps(runs, targets)]
        return _Reshare.apply(x, counts, dim, shard)

    return Step(reshare, wants_record=True)


BUILDERS = {"reshare": build}
