"""Closed-form lower bounds of the simulated step. They prune candidates and never choose one.

For a chain of stages where stage j takes f_j forward and b_j backward per microbatch, m microbatches, in any order:

- a lane starts after one forward of the stages before its first stage, then runs m (f + b) of all its stages; if its
  last action is a fused backward, the stages before its first stage each still run one backward;
- with fused backwards, the microbatch whose forward at s comes last finishes no earlier than total + (m - 1) f_s, and
  all backwards at s end no earlier than total + (m - 1) b_s, where total is one microbatch's path through all stages
  and back;
- a stage's reduction follows its last backward, and the optimizer step follows everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from pipefit.cost.types import Array, CostTable
from pipefit.plan.bounds.sliced_bounds import sliced_bound_s
from pipefit.schedule.actions import Schedule
from pipefit.schedule.families import family_facts


def min_in_flight(schedule: str, placement: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Return the least number of stage-microbatches whose activations each lane holds at once."""
    lanes = max(placement) + 1
    rule = family_facts(schedule).in_flight
    return tuple(rule(lane, lanes, placement.count(lane), microbatches) for lane in range(lanes))


def chain_bound_s(
    forward_s: Sequence[float], backward_s: Sequence[float], placement: Sequence[int], microbatches: int, fused: bool
) -> float:
    """Return a lower bound of a chain's compute time under any order. One entry per stage; `placement` gives its
    lane."""
    loads = [0.0] * (max(placement) + 1)
    first = [len(placement)] * len(loads)
    for stage, lane in enumerate(placement):
        loads[lane] += forward_s[stage] + backward_s[stage]
        first[lane] = min(first[lane], stage)
    heads = [0.0, *accumulate(forward_s)]
    tails = [0.0, *accumulate(backward_s)] if fused else [0.0] * len(heads)
    loaded = max(heads[s] + microbatches * load + tails[s] for s, load in zip(first, loads, strict=True))
    if not fused:
        return loaded
    total, more = heads[-1] + tails[-1], microbatches - 1
    return max(loaded, total + more * max(forward_s), total + more * max(backward_s))


def table_bound_s(costs: CostTable, placement: Sequence[int], microbatches: int, schedule: str) -> float:
    """Return a lower bound of the simulated time of a lowered schedule of this family, for a chain of stages."""
    stages = len(placement)
    slices = max(table.time_s.shape[2] for table in costs.actions.values())
    fused = _per_slice(costs, "B", stages, slices)
    parted = _per_slice(costs, "I", stages, slices) + _per_slice(costs, "W", stages, slices)
    family, hidden = family_facts(schedule), costs.reduce_hidden_s
    left = costs.reduce_s
    if hidden:
        left = left - (hidden["B"] if family.fused else np.maximum(hidden["B"], hidden["W"]))
    ahead, back = _transfer_times(costs, placement, slices)
    bound = sliced_bound_s(
        _per_slice(costs, "F", stages, slices),
        fused if family.fused else np.minimum(fused, parted),
        placement,
        microbatches,
        family.fused,
        ahead_s=ahead,
        back_s=back,
        left_s=np.asarray(left),
    )
    return bound + float(np.max(costs.step_s + np.bincount(np.asarray(placement), weights=costs.gather_s)))


def order_floor_bytes(schedule: Schedule, costs: CostTable) -> list[float]:
    """Return a lower bound of the memory of each lane under this order, without transfer buffers and temporary memory.
    Times are not needed."""
    count = max(table.held_bytes.shape[1] for table in costs.actions.values())  # 1 if all microbatches are alike
    shape = (schedule.num_stages, count, schedule.slices)
    change = {kind: np.broadcast_to(table.held_bytes, shape).tolist() for kind, table in costs.actions.items()}
    floors = []
    for lane, actions in enumerate(schedule.lanes):
        held = peak = 0.0
        for kind, stage, microbatch, slice_, _, _ in actions:
            held += change[kind][stage][microbatch % count][slice_]
            peak = max(peak, held)
        floors.append(float(costs.static_bytes[lane]) + peak)
    return floors


def _per_slice(costs: CostTable, kind: str, stages: int, slices: int) -> Array:
    """Return [slice, stage]: the least seconds over microbatches, including the overhead of an action."""
    table = costs.actions[kind].time_s
    spread = np.broadcast_to(table, (stages, table.shape[1], slices)).min(axis=1)
    per_slice: Array = (spread + costs.overhead_s).T
    return per_slice


def _transfer_times(costs: CostTable, placement: Sequence[int], slices: int) -> tuple[Array, Array]:
    """Return [slice, edge]: least seconds from each stage to the next, and back; zero if both are on one lane."""
    edges = len(placement) - 1
    ahead, back = np.zeros((slices, edges)), np.zeros((slices, edges))
    for edge in costs.edges:
        if edge.target == edge.source + 1 and not edge.tensor and placement[edge.source] != placement[edge.target]:
            ahead[:, edge.source] = edge.forward_s.min(axis=0)
            back[:, edge.source] = edge.backward_s.min(axis=0)
    return ahead, back
