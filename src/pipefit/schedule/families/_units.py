"""The forwards and backwards of a stage in the orders common to all families that support slices, and the warm-up of
the families that run forwards ahead."""

from __future__ import annotations

import math
from functools import lru_cache

from pipefit.schedule.actions import EVERY, Action, Kind, RoundRobin


@lru_cache(maxsize=1024)
def forward_actions(stage: int, microbatches: int, slices: int, turn: RoundRobin = EVERY) -> tuple[Action, ...]:
    """Return all forwards of a stage: microbatches ascending, slices of a microbatch ascending."""
    return tuple(Action("F", stage, m, k) for m in turn.unit_starts(microbatches) for k in range(slices))


@lru_cache(maxsize=1024)
def backward_actions(
    stage: int, microbatches: int, slices: int, kind: Kind = "B", turn: RoundRobin = EVERY
) -> tuple[Action, ...]:
    """Return all backwards of a stage: microbatches ascending, slices of a microbatch descending.

    The keys and values of a slice collect gradients from all later slices (TeraPipe, arXiv 2102.07988, section 3).
    """
    return tuple(Action(kind, stage, m, k) for m in turn.unit_starts(microbatches) for k in reversed(range(slices)))


def warm_up_units(hop: int, lane: int, lanes: int, stages_per_lane: int, microbatches: int, slices: int) -> int:
    """Return the forward units of a lane before its first backward, if it runs `hop` forwards ahead for every lane
    after it. The stages of a lane take groups of microbatches in turn (`interleaved_1f1b.py`)."""
    groups = max(1, microbatches // math.ceil(lanes / slices))
    around = hop * (lanes - 1 - lane)
    return min(
        microbatches * slices * stages_per_lane,
        (stages_per_lane - 1) * math.ceil(microbatches / groups) * slices + around + slices,
    )
