"""The input of a schedule family: stages and their placement, microbatches and slices, costs and memory limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipefit.cost.types import ActionTable, Array, CostTable, EdgeCost
from pipefit.errors import ScheduleError
from pipefit.schedule.actions import EVERY, RoundRobin

Edge = tuple[int, int, str]
"""(source stage, target stage, tensor): a tensor made by source and used by target; '' is the hidden state."""


def chain_edges(stages: int) -> tuple[Edge, ...]:
    """Return the edges of a plain chain: every stage passes its hidden state to the next."""
    return tuple((stage, stage + 1, "") for stage in range(stages - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleProblem:
    """The input of a schedule family."""

    placement: tuple[int, ...]
    "`placement[s]` is the lane that holds stage s."
    microbatches: int
    slices: int = 1
    "Slices per microbatch; 1 if sequences are not sliced."
    edges: tuple[Edge, ...] | None = None
    "None is the chain of all stages."
    costs: CostTable | None = None
    "The cost table for families that use costs; ignored by the rest."
    limit_bytes: tuple[float, ...] | None = None
    "Memory of every lane available for the bytes in `costs`; None is no limit."
    turns: tuple[RoundRobin, ...] = ()
    "The microbatches that every stage takes; (): all stages take all, one at a time."

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ScheduleError(
                "A step needs at least one microbatch.",
                where="microbatches",
                seen=self.microbatches,
                allowed="1 or more",
            )
        if self.slices < 1:
            raise ScheduleError(
                "A microbatch has at least one slice.", where="slices", seen=self.slices, allowed="1 or more"
            )
        if not self.placement or sorted(set(self.placement)) != list(range(self.num_lanes)):
            raise ScheduleError(
                "Every lane must hold a stage, and lanes are numbered from 0 without gaps.",
                where="placement",
                seen=self.placement,
                allowed="for example 0,1,2,3, or 0,1,1,0 for a V",
            )
        _check_edges(self.stage_edges, len(self.placement))
        _check_turns(self.turns, len(self.placement), self.microbatches)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_lanes(self) -> int:
        return max(self.placement, default=-1) + 1

    @property
    def stage_edges(self) -> tuple[Edge, ...]:
        """The edges, with the default filled in."""
        return chain_edges(self.num_stages) if self.edges is None else self.edges

    def stage_turn(self, stage: int) -> RoundRobin:
        """Return the share of microbatches that a stage takes."""
        return self.turns[stage] if self.turns else EVERY

    def lane_stages(self, lane: int) -> tuple[int, ...]:
        """Return the stages of a lane, ascending."""
        return tuple(stage for stage, stage_lane in enumerate(self.placement) if stage_lane == lane)

    def stage_depths(self) -> tuple[int, ...]:
        """Return, for each stage, the number of stages on the longest path from it to an end of the DAG, itself
        included."""
        depth = [1] * self.num_stages
        for source, target, _ in sorted(self.stage_edges, reverse=True):
            depth[source] = max(depth[source], depth[target] + 1)
        return tuple(depth)


@lru_cache(maxsize=256)
def linear_placement(devices: int) -> tuple[int, ...]:
    """Return the placement of one stage per lane."""
    return tuple(range(devices))


@lru_cache(maxsize=256)
def vee_placement(devices: int) -> tuple[int, ...]:
    """Return the V placement: lane i holds stages i and 2d-1-i (Qi et al. 2024, arXiv 2405.15362)."""
    return (*range(devices), *reversed(range(devices)))


def looped_placement(devices: int, turns: int = 2) -> tuple[int, ...]:
    """Return the placement of interleaved stages: stages 0 to d-1 on lanes 0 to d-1, and again from the first lane,
    `turns` times (Narayanan et al. 2021, arXiv 2104.04473)."""
    return tuple(range(devices)) * turns


def uniform_costs(
    placement: Sequence[int],
    edges: Sequence[Edge] | None = None,
    *,
    forward_s: float | Sequence[float] = 1.0,
    input_s: float | Sequence[float] = 1.0,
    weight_s: float | Sequence[float] = 1.0,
    transfer_s: float = 0.0,
    port_s: float = 0.0,
    held_bytes: tuple[float, float, float] = (1.0, 0.0, -1.0),
) -> CostTable:
    """Return a cost table in which all stages are alike, or differ in their times only.

    It serves drawings, defaults, benchmarks and closed forms. A time is one number, or one for each stage. B takes the
    time of I and W together. `held_bytes` are the bytes that F, I and W add to the memory: by default a forward holds 1
    byte, B or W frees it, and I changes nothing.
    """
    stages = len(placement)
    lanes = max(placement) + 1
    forward, backward, weight = (
        np.reshape(np.asarray(t, dtype=np.float64), (-1, 1, 1)) for t in (forward_s, input_s, weight_s)
    )

    def action_table(time_s: Array, held: float) -> ActionTable:
        return ActionTable(time_s=time_s, held_bytes=np.full((1, 1, 1), held), peak_bytes=np.zeros((1, 1, 1)))

    transfer, port, none = np.full((1, 1), float(transfer_s)), np.full((1, 1), float(port_s)), np.zeros((1, 1))
    return CostTable(
        actions={
            "F": action_table(forward, held_bytes[0]),
            "I": action_table(backward, held_bytes[1]),
            "W": action_table(weight, held_bytes[2]),
            "B": action_table(backward + weight, held_bytes[1] + held_bytes[2]),
        },
        edges=tuple(
            EdgeCost(
                source=source,
                target=target,
                tensor=tensor,
                forward_s=transfer,
                backward_s=transfer,
                forward_port_s=port,
                backward_port_s=port,
                forward_bytes=none,
                backward_bytes=none,
            )
            for source, target, tensor in (chain_edges(stages) if edges is None else edges)
        ),
        reduce_s=np.zeros(stages),
        gather_s=np.zeros(stages),
        step_s=np.zeros(lanes),
        static_bytes=np.zeros(lanes),
        notes=("uniform unit costs",),
    )


def _check_edges(edges: Sequence[Edge], stages: int) -> None:
    for source, target, tensor in edges:
        if not 0 <= source < target < stages:
            raise ScheduleError(
                "An edge must lead from a stage to a later one.",
                where="edges",
                seen=f"{source} -> {target}" + (f" ({tensor})" if tensor else ""),
                allowed=f"0 <= source < target < {stages}",
            )
    if len(set(edges)) != len(edges):
        raise ScheduleError("An edge is given twice.", where="edges", seen=edges)


def _check_turns(turns: Sequence[RoundRobin], stages: int, microbatches: int) -> None:
    if turns and len(turns) != stages:
        raise ScheduleError("A turn is needed for every stage, or for none.", where="turns", seen=len(turns))
    for stage, (turn, count, multiple) in enumerate(turns):
        if not 0 <= turn < count or multiple < 1 or microbatches % multiple or turn * multiple >= microbatches:
            raise ScheduleError(
                "The stage would have no microbatch, or cannot take this number together.",
                where=f"turns[{stage}]",
                seen=f"turn {turn} of {count}, {multiple} of {microbatches} microbatches together",
                allowed="0 <= turn < turns, a unit for every turn, and whole units",
            )
