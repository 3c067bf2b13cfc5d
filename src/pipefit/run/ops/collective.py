"""all_gather, reduce_scatter, all_reduce, shard_slice: the operators that a shard program puts between others.

Their attribute `size` is the size on this device afterwards; only that of all_gather is read, because it alone
cannot be seen from the input. `units` says that the dimension is cut in fewer units than it is long (heads).
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.run import shard_comm
from pipefit.run.ops import Context, Step
from pipefit.run.ops.shape import late_size
from pipefit.run.stage_record import Record


def build_all_gather(operator: Operator, context: Context) -> Step:
    dim, units, shard = _reading(operator, context)
    total = late_size(operator.attributes["size"])

    def all_gather(record: Record, x: torch.Tensor) -> Any:
        return shard_comm.AllGather.apply(x, shard.runs(total(record), units), dim, shard)

    return Step(all_gather, wants_record=True)


def build_reduce_scatter(operator: Operator, context: Context) -> Step:
    dim, units, shard = _reading(operator, context)
    return Step(lambda x: shard_comm.ReduceScatter.apply(x, shard.runs(x.shape[dim], units), dim, shard))


def build_all_reduce(operator: Operator, context: Context) -> Step:
    shard = context.shard
    return Step(lambda x: shard_comm.AllReduce.apply(x, shard))


def build_shard_slice(operator: Operator, context: Context) -> Step:
    dim, units, shard = _reading(operator, context)
    return Step(lambda x: shard_comm.ShardSlice.apply(x, shard.runs(x.shape[dim], units)[shard.position], dim))


def _reading(operator: Operator, context: Context) -> tuple[int, int, shard_comm.ShardContext]:
    assert context.shard is not None, "a collective in a stage without a shard axis"
    return int(operator.attributes["dim"]), int(operator.attributes.get("units", 0)), context.shard


BUILDERS = {
    "all_gather": build_all_gather,
    "reduce_scatter": build_reduce_scatter,
    "all_reduce": build_all_reduce,
    "shard_slice": build_shard_slice,
}
