"""V-ZB: the V block with the memory of 1F1B and, for equal times of F, I and W, without a bubble (Qi et al. 2024, arXiv
2405.15362, section 3.1).

Every lane of d holds 2d stage-microbatches (a stage is half of a lane of 1F1B). In unit time, with enough microbatches
(about 2d), no lane idles between its first and its last action.
"""

from __future__ import annotations

from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock, place_weights
from pipefit.schedule.families._blocks import control_actions, make_schedule, require_vee
from pipefit.schedule.problem import ScheduleProblem, vee_placement

name = "v-zb"
placement = vee_placement


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError for another placement than the V."""
    lanes = require_vee("V-ZB", problem)
    return make_schedule(name, problem, control_actions(block(lanes), problem.microbatches, problem.slices))


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches + 1, 2 * lanes)


def block(lanes: int) -> BuildingBlock:
    """Return the block: hops of 4 slots on the way down and in the second half of the backward, 2 elsewhere, no pause
    at turns."""
    d = lanes
    down, up = range(d), range(d - 1, -1, -1)
    forward = [4 * i for i in down] + [6 * d - 5 - 2 * i for i in up]
    backward = [12 * d - 9 - 2 * i for i in down] + [6 * d - 4 + 4 * i for i in up]
    return place_weights(
        BuildingBlock(placement=vee_placement(d), interval=6, forward=tuple(forward), backward=tuple(backward))
    )
