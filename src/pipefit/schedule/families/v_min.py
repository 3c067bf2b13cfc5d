"""V-Min: the V block with the least memory, about a third of 1F1B (Qi et al. 2024, arXiv 2405.15362, section 3.1).

Every lane of d holds 2 floor((d + 4) / 3) stage-microbatches, compared with 2 d of 1F1B. In unit time the slowest lane
idles max(0, 6 d - 3 k - 1) slots at that peak k. If F, I and W differ, there are bubbles in every period: with measured
times it is often slower than 1F1B.
"""

from __future__ import annotations

from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock, place_weights
from pipefit.schedule.families import v_zb
from pipefit.schedule.families._blocks import control_actions, make_schedule, require_vee
from pipefit.schedule.problem import ScheduleProblem, vee_placement

name = "v-min"
placement = vee_placement


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError for another placement than the V."""
    lanes = require_vee("V-Min", problem)
    return make_schedule(name, problem, control_actions(block(lanes), problem.microbatches, problem.slices))


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches + 1, -(-2 * lanes // 3) + 1)


def block(lanes: int) -> BuildingBlock:
    """Return the block: all hops are one slot, and the turn from forward to backward waits e = 0, 2 or 4.

    e = 2 for d = 3, 6, 9, ... keeps passes from colliding. e = 4 for d = 5, 8, 11, ... is our change: the published
    block has e = 0 there, and with the same peak four more slots of bubble. Up to two lanes the peak is that of V-ZB,
    whose block has no bubble.
    """
    d = lanes
    if d <= 2:
        return v_zb.block(d)
    e = 2 * ((1 - d) % 3)
    down, up = range(d), range(d - 1, -1, -1)
    forward = [*down, *(2 * d - 1 - i for i in up)]
    backward = [4 * d + e - 1 - i for i in down] + [2 * d + e + i for i in up]
    return place_weights(
        BuildingBlock(placement=vee_placement(d), interval=6, forward=tuple(forward), backward=tuple(backward))
    )
