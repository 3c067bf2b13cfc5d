"""Orders for lanes with several stages in line: the first and the last lane of a pipeline do small modules as well.

An encoder lies on the pipeline's first lane and a generator on its last, on the very devices of the stage there. The
lanes keep the order of their family; whatever it has a lane do, all stages of the lane do one after the other
(reference: the monolithic layouts of Megatron-LM, by the account of DistTrain, arXiv 2408.04275, section 7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Action, Schedule
from pipefit.schedule.problem import ScheduleProblem, linear_placement


def inline_order(build: Callable[[ScheduleProblem], Schedule], problem: ScheduleProblem) -> Schedule:
    """The computed schedule of `problem`, whose placement has a run of stages of the chain on every lane: the order of
    `build` for a stage a lane, every action that of all stages of the lane, forwards along the chain and backwards
    against it. Raises ScheduleError for slices, and what `build` raises."""
    if problem.slices > 1:
        raise ScheduleError(
            "Modules in line on a lane take whole microbatches.", where="slices", seen=problem.slices, allowed="1"
        )
    assert [*problem.placement] == sorted(problem.placement), "a lane has a run of the chain"
    plain = build(ScheduleProblem(placement=linear_placement(problem.num_lanes), microbatches=problem.microbatches))
    lanes = []
    for lane, actions in enumerate(plain.lanes):
        own = [stage for stage, at in enumerate(problem.placement) if at == lane]
        line: list[Action] = []
        for action in actions:
            line += [action._replace(stage=stage) for stage in (own if action.kind == "F" else reversed(own))]
        lanes.append(tuple(line))
    return replace(plain, placement=problem.placement, lanes=tuple(lanes))
