"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

All microbatches are in memory at the peak. The time on d equal stages is (m + d - 1)(f + b). With several stages on a
lane (looped or V placements) it runs breadth-first: the forwards stage by stage, the backwards in the opposite order.
With slices it is the order of TeraPipe. Stages that take turns run their own microbatches breadth-first too.
"""

from __future__ import annotations

from itertools import chain as joined

from pipefit.schedule.actions import Schedule
from pipefit.schedule.families._units import backward_actions, forward_actions
from pipefit.schedule.problem import ScheduleProblem

name = "gpipe"
knows_turns = True
fused = True
shown_in_trade = False


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule, for any placement and any DAG whose edges lead to later stages."""
    m, s = problem.microbatches, problem.slices
    lanes = []
    for lane in range(problem.num_lanes):
        held = problem.lane_stages(lane)
        parts = [forward_actions(stage, m, s, problem.stage_turn(stage)) for stage in held]
        parts += [backward_actions(stage, m, s, turn=problem.stage_turn(stage)) for stage in reversed(held)]
        lanes.append(tuple(joined.from_iterable(parts)))
    return Schedule(
        name=name, placement=problem.placement, microbatches=m, slices=s, lanes=tuple(lanes), turns=problem.turns
    )


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return microbatches * stages_per_lane


def warm_up(lane: int, lanes: int, stages_per_lane: int, microbatches: int, slices: int) -> int:
    """Return the forward units before the first backward: all of them."""
    return microbatches * slices * stages_per_lane
