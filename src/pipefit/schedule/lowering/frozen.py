"""Stages without a backward: no parameter is trained in them or in a stage before them.

Such a stage has forwards only. No gradient is sent to it, and the stages that it feeds compute none for it (reference:
DistTrain and Cornstarch count such a backward as zero).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from pipefit.schedule.actions import COMPUTE, Schedule
from pipefit.schedule.problem import Edge

BACKWARD_KINDS = tuple(kind for kind in COMPUTE if kind != "F")


def frozen_stages(stages: int, edges: Iterable[Edge], trained: Iterable[int]) -> frozenset[int]:
    """Return the stages without a backward; `trained` are the stages with a trainable parameter."""
    reached = set(trained)
    for source, target, _ in sorted(edges):
        if source in reached:
            reached.add(target)
    return frozenset(range(stages)) - reached


def with_backward(schedule: Schedule) -> frozenset[int]:
    """Return the stages of a schedule that have a backward."""
    return frozenset(action.stage for _, _, action in schedule if action.kind in BACKWARD_KINDS)


def without_backward(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Return a computed schedule without the backwards of these stages, in otherwise unchanged order."""
    if not stages:
        return schedule
    lanes = tuple(tuple(a for a in lane if a.kind == "F" or a.stage not in stages) for lane in schedule.lanes)
    return replace(schedule, lanes=lanes)
