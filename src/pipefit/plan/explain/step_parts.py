"""Parts of a step: how the busiest lane of a simulated plan spends its time.

The parts add up to the step. Compute actions are divided by costing their stage again: without sharded state, without
collectives, and without recomputation. Idle time of the lane is waiting for transfers, or the pipeline bubble. The rest
of the step comes after the last compute action of all lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import fsum

import numpy as np

from pipefit.cost.comm.network import Network
from pipefit.cost.compute.roofline import LayerCosts
from pipefit.cost.pipeline.stage_cost import StageCost
from pipefit.cost.pipeline.table import collective_shares, slice_places, stage_cost
from pipefit.cost.work import PipelineWork, StageWork
from pipefit.plan.assemble.predict import PlanSimulation, critical_path_shares
from pipefit.schedule.taskgraph.table import B, F, I, W

COMPUTE, RECOMPUTATION = "compute", "recomputation"
COLLECTIVES, STATE = "collectives inside the layers", "gathers and sums of sharded state"
BUBBLE, TRANSFERS = "pipeline bubble", "waiting for transfers"
REDUCTION, GATHER, UPDATE = "gradient reduction", "parameter gather", "optimizer step"

STEP_PARTS = (COMPUTE, RECOMPUTATION, COLLECTIVES, STATE, BUBBLE, TRANSFERS, REDUCTION, GATHER, UPDATE)
"""All parts, in the order of the table."""

SECONDS_FIELDS = {F: ("F", "forward_s"), I: ("I", "input_s"), W: ("W", "weight_s"), B: ("B", "backward_s")}
"""Kind of a compute action -> its name, and its field of `StageCost`."""

PartShares = Mapping[str, float]


def step_parts(simulation: PlanSimulation, network: Network, layers: LayerCosts) -> dict[str, float]:
    """Return the seconds of every part of the step on the busiest lane. They add up to the step time."""
    timeline, costs, work = simulation.timeline, simulation.costs, simulation.work
    graph, seconds = timeline.graph, timeline.times.duration_s
    lane = int(timeline.busy_s.argmax())
    shares = {
        (stage, kind, slice_): part
        for stage, stage_work in enumerate(work.stages)
        if stage_work.lane == lane
        for (kind, slice_), part in _action_shares(stage_work, work, network, layers).items()
    }
    parts = dict.fromkeys(STEP_PARTS, 0.0)
    for task in np.flatnonzero((graph.kind <= B) & (graph.lane == lane)).tolist():
        operators_s = max(0.0, float(seconds[task]) - costs.overhead_s)
        parts[COMPUTE] += float(seconds[task])
        for name, share in shares[int(graph.stage[task]), int(graph.kind[task]), int(graph.slice[task])].items():
            parts[name] += share * operators_s
            parts[COMPUTE] -= share * operators_s
    computed_s = fsum(parts.values())
    idle_s = max(0.0, timeline.compute_end_s - computed_s)
    parts[TRANSFERS] = min(idle_s, float(timeline.exposed_transfer_s[lane]))
    parts[BUBBLE] = idle_s - parts[TRANSFERS]
    path = critical_path_shares(timeline)
    after_s = timeline.makespan_s - timeline.compute_end_s
    parts[UPDATE] = min(after_s, path.get(UPDATE, 0.0))
    parts[GATHER] = min(after_s - parts[UPDATE], path.get(GATHER, 0.0))
    parts[REDUCTION] = after_s - parts[UPDATE] - parts[GATHER]
    return parts


def describe_part(name: str) -> str:
    """Return a part in the words of a sentence."""
    return "compute on the busiest lane" if name == COMPUTE else name


def _action_shares(
    stage: StageWork, work: PipelineWork, network: Network, layers: LayerCosts
) -> Mapping[tuple[int, int], PartShares]:
    """Return the shares of an action's time that are not plain compute, by kind and slice of the action."""
    unsharded = replace(
        stage, sharded_state="none", sharded_elements=(), sharded_spread=(), sharded_frozen=(), state_group=0
    )
    plain = replace(unsharded, recompute="none")
    inside = collective_shares(unsharded, work, network, layers)
    plain_inside = collective_shares(plain, work, network, layers)
    shares: dict[tuple[int, int], PartShares] = {}
    for slice_, (tokens, past) in enumerate(slice_places(stage.slices)):
        total, stored, bare = (
            stage_cost(variant, tokens, past, work, network, layers) for variant in (stage, unsharded, plain)
        )
        for kind, (name, field) in SECONDS_FIELDS.items():
            total_s, stored_s, bare_s = (_field_seconds(cost, field) for cost in (total, stored, bare))
            collectives_s = stored_s * inside[slice_][name]
            recomputed_s = stored_s - collectives_s - bare_s * (1.0 - plain_inside[slice_][name])
            parts_s = {STATE: total_s - stored_s, COLLECTIVES: collectives_s, RECOMPUTATION: recomputed_s}
            shares[kind, slice_] = {part: part_s / total_s for part, part_s in parts_s.items() if part_s > 0.0}
    return shares


def _field_seconds(cost: StageCost, field: str) -> float:
    return float(getattr(cost, field))
