"""Stages without a backward: those of which, and before which, nothing is trained.

Such a stage has its F and nothing else. No gradient is sent to it, and what it feeds computes none for it (reference:
DistTrain and Cornstarch count such a backward as zero).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from pipefit.schedule.actions import COMPUTE, Schedule
from pipefit.schedule.problem import Edge

BACKWARD = tuple(kind for kind in COMPUTE if kind != "F")


def frozen_stages(stages: int, edges: Iterable[Edge], trained: Iterable[int]) -> frozenset[int]:
    """The stages without a backward, of so many: `trained` are those that hold a parameter that is trained."""
    reached = set(trained)
    for source, target, _ in sorted(edges):
        if source in reached:
            reached.add(target)
    return frozenset(range(stages)) - reached


def with_backward(schedule: Schedule) -> frozenset[int]:
    """The stages that a schedule has a backward of."""
    return frozenset(action.stage for _, _, action in schedule if action.kind in BACKWARD)


def without_backward(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """A computed schedule without the backward of these stages; the rest stands in the same order."""
    if not stages:
        return schedule
    lanes = tuple(tuple(a for a in lane if a.kind == "F" or a.stage not in stages) for lane in schedule.lanes)
    return replace(schedule, lanes=lanes)
