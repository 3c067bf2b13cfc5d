"""unshard(weight) {dim, size, units}: a parameter stored as one shard, for an operator that uses all of it.

Operators that gather the weight themselves (`OperatorKind.gathers`) receive a handle. Others receive the gathered
weight; autograd reduce-scatters its gradient.
"""

from __future__ import annotations

from pipefit.model.graph import Operator
from pipefit.model.ops.exchange import lowering_of
from pipefit.model.ops.unshard import gathers_of
from pipefit.run.ops import OperatorContext, OperatorStep
from pipefit.run.sharded import collectives as shard_comm
from pipefit.run.sharded.weights import ShardedWeight


def build_unshard(operator: Operator, context: OperatorContext) -> OperatorStep:
    shard = context.shard
    assert shard is not None, "a collective in a stage without a shard axis"
    dim, how = int(operator.attributes["dim"]), lowering_of(operator)
    runs = shard.runs(int(operator.attributes["size"]), int(operator.attributes.get("units", 0)))
    if gathers_of(context.graph, operator.outputs[0]):
        return OperatorStep(lambda weight: ShardedWeight(weight, runs, dim, shard, how))
    return OperatorStep(lambda weight: shard_comm.AllGather.apply(weight, runs, dim, shard, how))


BUILDERS = {"unshard": build_unshard}
