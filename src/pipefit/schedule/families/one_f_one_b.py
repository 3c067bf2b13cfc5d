"""1F1B: after a warm-up, one forward and one backward in turn (PipeDream-Flush, Narayanan et al. 2021, arXiv
2006.09503; called 1F1B in Megatron-LM).

A stage that is j stages from the end keeps min(m, j + 1) microbatches alive, so stage i of d holds min(m, d - i). With
slices it is the order of Seq1F1B (Sun et al. 2024, arXiv 2406.03488): the warm-up is longer by slices - 1 units,
because the first backward needs all slices of its microbatch, and min(m s, d - i + s - 1) slices are alive.
"""

from __future__ import annotations

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Action, Schedule
from pipefit.schedule.families._units import backward_actions, forward_actions, warm_up_units
from pipefit.schedule.problem import ScheduleProblem

name = "1f1b"
fused = True
guest_units_ahead = (1,)
more_guest_units_ahead = (4,)


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError if a lane holds several stages."""
    return build_ahead(name, problem, hop=1)


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches, lanes - lane)


def warm_up(lane: int, lanes: int, stages_per_lane: int, microbatches: int, slices: int) -> int:
    """Return the forward units before the first backward: one forward ahead for every following lane."""
    return warm_up_units(1, lane, lanes, stages_per_lane, microbatches, slices)


def build_ahead(name: str, problem: ScheduleProblem, hop: int) -> Schedule:
    """Build 1F1B whose stages run `hop` more forwards ahead for every stage between them and the end.

    With hop 1, the minimum, no stage waits for work if transfers take no time. Raises ScheduleError if a lane holds
    several stages.
    """
    if problem.num_lanes != problem.num_stages:
        crowded = max(range(problem.num_lanes), key=lambda lane: len(problem.lane_stages(lane)))
        raise ScheduleError(
            "1F1B is written for one stage per lane.",
            where="placement",
            seen=f"lane {crowded} holds stages {', '.join(map(str, problem.lane_stages(crowded)))}",
            allowed=f"{problem.num_lanes} stages for {problem.num_lanes} lanes",
            next_step="use gpipe, which takes any placement, or a schedule made for this placement",
        )
    lanes: list[tuple[Action, ...]] = [()] * problem.num_lanes
    for stage, depth in enumerate(problem.stage_depths()):
        lanes[problem.placement[stage]] = _lane_actions(stage, hop * (depth - 1), problem)
    return Schedule(
        name=name,
        placement=problem.placement,
        microbatches=problem.microbatches,
        slices=problem.slices,
        lanes=tuple(lanes),
    )


def _lane_actions(stage: int, ahead_of_end: int, problem: ScheduleProblem) -> tuple[Action, ...]:
    ahead = forward_actions(stage, problem.microbatches, problem.slices)
    back = backward_actions(stage, problem.microbatches, problem.slices)
    warm = min(len(ahead), ahead_of_end + problem.slices - 1)
    steady = [action for pair in zip(ahead[warm:], back, strict=False) for action in pair]
    return (*ahead[:warm], *steady, *back[len(ahead) - warm :])
