"""Costs of stages that take turns on several lanes: the sum of their gradients, and exchanges within a lane.

Their parameters lie on several lanes, so gradients are summed over the devices of all these lanes, when all have
finished. Neighbouring stages of one lane may have different meshes. Then tensors move between the lane's devices
without a transfer between lanes, and the stage that takes turns waits for them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipefit.cost.comm.collectives import all_reduce_s
from pipefit.cost.comm.network import Network
from pipefit.cost.static_memory import GRADIENT_BYTES
from pipefit.cost.types import ActionTable, Array, CostTable, EdgeCost
from pipefit.cost.work import PipelineWork


def add_turn_costs(costs: CostTable, work: PipelineWork, network: Network) -> CostTable:
    """Return these costs with those of stages that take turns."""
    width = GRADIENT_BYTES[work.precision]
    summed_s = np.zeros(len(work.stages))
    for tied in work.tied:
        if tied.rings:
            summed_s[list(tied.stages)] += all_reduce_s(network, tied.rings, tied.elements * width)
    if summed_s.any():
        costs = replace(costs, tied_s=summed_s)
    for edge, edge_work in zip(costs.edges, work.edges, strict=True):
        source, target = work.stages[edge.source], work.stages[edge.target]
        if source.lane == target.lane and (source.group != target.group or edge_work.ragged):
            waits = edge.target if target.turns > 1 else edge.source
            costs = _add_exchange_time(costs, edge, waits, len(work.stages))
    return costs


def _add_exchange_time(costs: CostTable, edge: EdgeCost, stage: int, stages: int) -> CostTable:
    """Return the costs with an edge within a lane added to the forward and the backward of one stage."""
    actions = dict(costs.actions)
    for kind, seconds in (("F", edge.forward_s), ("B", edge.backward_s), ("I", edge.backward_s)):
        actions[kind] = _lengthen_actions(actions[kind], seconds, stage, stages)
    return replace(costs, actions=actions)


def _lengthen_actions(table: ActionTable, seconds: Array, stage: int, stages: int) -> ActionTable:
    microbatches = max(table.time_s.shape[1], len(seconds))
    time_s = np.broadcast_to(table.time_s, (stages, microbatches, table.time_s.shape[2])).copy()
    time_s[stage] += seconds
    return replace(table, time_s=time_s)
