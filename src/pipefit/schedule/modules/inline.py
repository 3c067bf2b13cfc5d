"""Schedules for lanes with several stages: small modules run inline on the first and the last lane of a pipeline.

An encoder lies on the pipeline's first lane and a generator on its last, on the devices of the stage there. The lanes
keep the order of their schedule family; each action of a lane is done by all its stages, one after the other
(reference: the monolithic layouts of Megatron-LM, as described by DistTrain, arXiv 2408.04275, section 7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Action, Schedule
from pipefit.schedule.problem import ScheduleProblem, linear_placement


def inline_order(build: Callable[[ScheduleProblem], Schedule], problem: ScheduleProblem) -> Schedule:
    """Return the computed schedule of `problem`, whose placement has a run of consecutive stages on every lane.

    It is the schedule that `build` returns for one stage per lane, with each action repeated for all stages of the
    lane: forwards along the chain, backwards against it. Raises ScheduleError for slices, and the errors of `build`.
    """
    if problem.slices > 1:
        raise ScheduleError(
            "Modules in line on a lane take whole microbatches.", where="slices", seen=problem.slices, allowed="1"
        )
    assert [*problem.placement] == sorted(problem.placement), "a lane has a run of the chain"
    plain = build(ScheduleProblem(placement=linear_placement(problem.num_lanes), microbatches=problem.microbatches))
    lanes = []
    for lane, actions in enumerate(plain.lanes):
        lane_stages = [stage for stage, stage_lane in enumerate(problem.placement) if stage_lane == lane]
        line: list[Action] = []
        for action in actions:
            line += [
                action._replace(stage=stage) for stage in (lane_stages if action.kind == "F" else reversed(lane_stages))
            ]
        lanes.append(tuple(line))
    return replace(plain, placement=problem.placement, lanes=tuple(lanes))
