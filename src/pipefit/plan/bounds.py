"""Closed forms that are true lower bounds of the simulated step: they prune, they never decide.

For a chain of stages where stage j takes f_j forward and b_j backward per microbatch, m microbatches, in any order:

- stage s cannot start before the stages before it have done one forward, has m (f_s + b_s) to do, and after the last
  of it, if its last action is a fused backward, the stages before it each still have one backward to do;
- where every backward is fused, the microbatch whose forward at s comes last cannot be finished before
  total + (m - 1) f_s, nor all backwards at s before total + (m - 1) b_s, where total is one microbatch's way through
  all stages and back;
- a stage's reduction follows its last backward, and the optimizer step follows everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipefit.cost.types import Array, CostTable


@dataclass(frozen=True, slots=True)
class Facts:
    """What is certain of a schedule family on a chain with one stage per lane."""

    fused: bool
    "Whether every backward is a B, so that a lane's last action is one."
    in_flight: str
    "`all` microbatches, those up to the `end` of the chain, or at least `one`."


FACTS: Mapping[str, Facts] = {
    "gpipe": Facts(fused=True, in_flight="all"),
    "1f1b": Facts(fused=True, in_flight="end"),
}
"""Families that are not listed are bounded by what holds for any order."""

_ANY = Facts(fused=False, in_flight="one")


def facts_of(schedule: str) -> Facts:
    """What is certain of a family; of one that is not listed, what holds for any order."""
    return FACTS.get(schedule, _ANY)


def in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """The least number of microbatches whose activations a stage of a chain holds at once.

    GPipe holds all of them, 1F1B as many as there are stages to the end (Narayanan et al. 2021, arXiv 2104.04473);
    of any other order only one is certain.
    """
    rule = facts_of(schedule).in_flight
    return {"all": microbatches, "end": min(microbatches, stages - stage), "one": 1}[rule]


def chain_bound_s(forward_s: Sequence[float], backward_s: Sequence[float], microbatches: int, fused: bool) -> float:
    """The least time of a chain's compute, whatever the order. One entry a stage."""
    both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    heads = [0.0, *accumulate(forward_s)]
    tails = [0.0, *accumulate(backward_s)] if fused else [0.0] * (len(both) + 1)
    total, more = sum(both), microbatches - 1
    loaded = max(head + microbatches * work + tail for head, work, tail in zip(heads, both, tails, strict=False))
    if not fused:
        return loaded
    return max(loaded, total + more * max(forward_s), total + more * max(backward_s))


def any_cut_bound_s(
    forward_s: float, backward_s: float, largest_layer_s: float, lanes: int, microbatches: int, fused: bool
) -> float:
    """The least time of any cut of layers that take `forward_s` and `backward_s` per microbatch, over `lanes` lanes.

    With `fused` (a chain of fused stages, one a lane) two more things hold for every cut, W being the sum:
    the largest of prefix + m w over the stages is least where all are equal, which gives T = W / (1 - (1 - 1/m)^lanes);
    and the slowest stage has at least its equal part of the forwards, and of the backwards.
    """
    total_s = forward_s + backward_s
    least = microbatches * max(total_s / lanes, largest_layer_s)
    if not fused:
        return least
    filled = total_s / (1 - (1 - 1 / microbatches) ** lanes)
    way = total_s + (microbatches - 1) * max(forward_s, backward_s) / lanes
    return max(least, filled, way)


def table_bound_s(costs: CostTable, placement: Sequence[int], microbatches: int, schedule: str) -> float:
    """The least simulated time of a lowered schedule of that family under this table, for a chain of stages.

    With several stages on a lane only what any order obeys is used.
    """
    stages = len(placement)
    slices = max(table.time_s.shape[2] for table in costs.actions.values())
    forward = _per_stage(costs, "F", stages, slices)
    fused = _per_stage(costs, "B", stages, slices)
    parted = _per_stage(costs, "I", stages, slices) + _per_stage(costs, "W", stages, slices)
    facts = facts_of(schedule)
    backward = fused if facts.fused else np.minimum(fused, parted)
    after = max(
        float(costs.step_s[lane]) + sum(float(costs.gather_s[s]) for s in range(stages) if placement[s] == lane)
        for lane in range(max(placement) + 1)
    )
    if slices > 1 or len(set(placement)) < stages:
        work = np.bincount(np.asarray(placement), weights=forward + backward)
        return float(microbatches * work.max()) + after
    ahead, back = _transfers(costs, stages)
    heads = np.concatenate(([0.0], np.cumsum(forward[:-1] + ahead)))
    tails = np.concatenate(([0.0], np.cumsum(backward[:-1] + back))) if facts.fused else np.zeros(stages)
    loaded = heads + microbatches * (forward + backward)
    way = float(forward.sum() + backward.sum() + ahead.sum() + back.sum()) if facts.fused else 0.0
    more = microbatches - 1
    return after + max(
        float((loaded + np.maximum(tails, costs.reduce_s)).max()),
        way + more * float(forward.max()) if facts.fused else 0.0,
        way + more * float(backward.max()) if facts.fused else 0.0,
    )


def _per_stage(costs: CostTable, kind: str, stages: int, slices: int) -> Array:
    """Seconds of one microbatch, all slices and the overhead of each action included."""
    table = costs.actions[kind].time_s
    spread = np.broadcast_to(table, (stages, table.shape[1], slices)).min(axis=1)
    per_stage: Array = (spread + costs.overhead_s).sum(axis=1)
    return per_stage


def _transfers(costs: CostTable, stages: int) -> tuple[Array, Array]:
    """Least seconds from each stage to the next, and back."""
    ahead, back = np.zeros(stages - 1), np.zeros(stages - 1)
    for edge in costs.edges:
        if edge.target == edge.source + 1 and not edge.tensor:
            ahead[edge.source] = float(edge.forward_s.min())
            back[edge.source] = float(edge.backward_s.min())
    return ahead, back
