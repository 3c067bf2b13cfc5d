"""reshare(x) {dim, whole, from, to}: change a dimension's split over the devices from one set of shares to another.

Every device sends every other device their overlap, in one all-to-all with split sizes; parts that stay do not leave
the device. `units` means that the dimension is cut in fewer units than it is long.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.lab.pace import pace_collective
from pipefit.layout import overlap_lengths, split_by_shares
from pipefit.model.graph import Operator
from pipefit.model.ops.reshare import shares_of
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.shape import deferred_size
from pipefit.run.sharded.parts import ShardContext, require_part
from pipefit.run.transfers import comms

SentLengths = list[list[int]]
"""[source device][target device]: length along the dimension that is sent."""


class _ReshareFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: SentLengths, dim: int, shard: ShardContext) -> torch.Tensor:
        ctx.counts, ctx.dim, ctx.shard = counts, dim, shard
        return _exchange_shares(x, counts, dim, shard)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        back = [list(column) for column in zip(*ctx.counts, strict=True)]
        return _exchange_shares(dy, back, ctx.dim, ctx.shard), None, None, None


def _exchange_shares(x: torch.Tensor, counts: SentLengths, dim: int, shard: ShardContext) -> torch.Tensor:
    moved = x.movedim(dim, 0).contiguous()
    sent, received = counts[shard.position], [row[shard.position] for row in counts]
    out = moved.new_empty((sum(received), *moved.shape[1:]))
    pace_collective(lambda: comms.exchange(out, moved, received, sent, shard.group))
    return out.movedim(0, dim).contiguous()


def build_reshare(operator: Operator, context: OperatorContext) -> OperatorStep:
    shard = context.shard
    assert shard is not None, "a collective in a stage without a shard axis"
    dim, units = int(operator.attributes["dim"]), int(operator.attributes.get("units", 0))
    total, (old, new) = deferred_size(operator.attributes["whole"], shard), shares_of(operator)

    def run_reshare(record: SavedForward, x: torch.Tensor) -> Any:
        length = total(record)
        runs, targets = (split_by_shares(length, shares, length // units if units else 1) for shares in (old, new))
        require_part(x, dim, runs, shard, "reshare")
        counts = [[int(size) for size in row] for row in overlap_lengths(runs, targets)]
        return _ReshareFunction.apply(x, counts, dim, shard)

    return OperatorStep(run_reshare, wants_record=True)


BUILDERS = {"reshare": build_reshare}
