"""V-Half: the V block with about half of the memory of 1F1B (Qi et al. 2024, arXiv 2405.15362, section 3.1).

Every lane of d holds 2 floor((d + 2) / 2) stage-microbatches, compared with 2 d of 1F1B. In unit time the slowest lane
idles max(0, 6 d - 3 k - 1) slots at that peak k. Bubbles repeat in every period if F, I and W are so unequal that W + 2
I < 2 F or W + 2 F < 2 I.
"""

from __future__ import annotations

from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock, place_weights
from pipefit.schedule.families import v_zb
from pipefit.schedule.families._blocks import control_actions, make_schedule, require_vee
from pipefit.schedule.problem import ScheduleProblem, vee_placement

name = "v-half"
placement = vee_placement


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError for another placement than the V."""
    lanes = require_vee("V-Half", problem)
    return make_schedule(name, problem, control_actions(block(lanes), problem.microbatches, problem.slices))


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches + 1, lanes)


def block(lanes: int) -> BuildingBlock:
    """Return the block: hops of 2 slots on the way down and in the second half of the backward, 1 elsewhere.

    The turn from forward to backward waits 3 slots if d is even, or passes would collide. Up to two lanes the peak is
    that of V-ZB, whose block has no bubble.
    """
    d = lanes
    if d <= 2:
        return v_zb.block(d)
    e = 3 if d % 2 == 0 else 0
    down, up = range(d), range(d - 1, -1, -1)
    forward = [2 * i for i in down] + [3 * d - 2 - i for i in up]
    backward = [6 * d + e - 2 - i for i in down] + [3 * d + e - 1 + 2 * i for i in up]
    return place_weights(
        BuildingBlock(placement=vee_placement(d), interval=6, forward=tuple(forward), backward=tuple(backward))
    )
