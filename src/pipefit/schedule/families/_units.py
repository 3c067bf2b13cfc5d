"""The forwards and backwards of a stage, in the orders common to all families that support slices."""

from __future__ import annotations

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
