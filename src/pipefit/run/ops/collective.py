"""all_gather, reduce_scatter, all_to_all, all_reduce, shard_slice: the collectives of a shard program.

Their attribute `size` is the local size of the result. Only the `size` of all_gather and the `whole` of all_to_all are
read, because the input does not show them. `units` means that the dimension is cut in fewer units than it is long
(heads). `lowering` says how uneven parts are moved, in the forward and in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from pipefit.model.graph import Operator
from pipefit.model.ops.exchange import lowering_of
from pipefit.run.autograd.saved_forward import SavedForward
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.ops.shape import deferred_size
from pipefit.run.sharded import collectives as shard_comm
from pipefit.run.sharded.parts import ShardContext


def build_all_gather(operator: Operator, context: OperatorContext) -> OperatorStep:
    dim, units, shard = _read_operator(operator, context)
    total, how = deferred_size(operator.attributes["size"], shard), lowering_of(operator)

    def all_gather(x: torch.Tensor, size: int) -> Any:
        return shard_comm.AllGather.apply(x, shard.runs(size, units), dim, shard, how)

    return OperatorStep(all_gather, prepare=lambda record: (total(record),))


def build_reduce_scatter(operator: Operator, context: OperatorContext) -> OperatorStep:
    dim, units, shard = _read_operator(operator, context)
    how = lowering_of(operator)
    return OperatorStep(lambda x: shard_comm.ReduceScatter.apply(x, shard.runs(x.shape[dim], units), dim, shard, how))


def build_all_to_all(operator: Operator, context: OperatorContext) -> OperatorStep:
    dim, units, shard = _read_operator(operator, context)
    how, old, old_units = lowering_of(operator), int(operator.attributes["from"]), operator.attributes["from_units"]
    total = deferred_size(operator.attributes["whole"], shard)

    def all_to_all(record: SavedForward, x: torch.Tensor) -> Any:
        cut, new = (shard.runs(total(record), old_units), old), (shard.runs(x.shape[dim], units), dim)
        return shard_comm.AllToAll.apply(x, cut, new, shard, how)

    return OperatorStep(all_to_all, wants_record=True)


def build_all_reduce(operator: Operator, context: OperatorContext) -> OperatorStep:
    shard = context.shard
    return OperatorStep(lambda x: shard_comm.AllReduce.apply(x, shard))


def build_shard_slice(operator: Operator, context: OperatorContext) -> OperatorStep:
    dim, units, shard = _read_operator(operator, context)
    return OperatorStep(lambda x: shard_comm.ShardSlice.apply(x, shard.runs(x.shape[dim], units)[shard.position], dim))


def _read_operator(operator: Operator, context: OperatorContext) -> tuple[int, int, ShardContext]:
    assert context.shard is not None, "a collective in a stage without a shard axis"
    return int(operator.attributes["dim"]), int(operator.attributes.get("units", 0)), context.shard


BUILDERS = {
    "all_gather": build_all_gather,
    "reduce_scatter": build_reduce_scatter,
    "all_to_all": build_all_to_all,
    "all_reduce": build_all_reduce,
    "shard_slice": build_shard_slice,
}
