"""1F1B-V: the V placement with fused backwards, about two thirds of the memory of 1F1B (Qi et al. 2024, arXiv
2405.15362, appendix).

Every lane of d holds 2 (floor(2 d / 3) + 1) stage-microbatches, compared with 2 d of 1F1B. In unit time its bubble is
also smaller: with 8 lanes 33 slots, compared with 42.
"""

from __future__ import annotations

from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock
from pipefit.schedule.families._blocks import make_schedule, pull_actions, require_vee
from pipefit.schedule.problem import ScheduleProblem, vee_placement

name = "1f1b-v"
placement = vee_placement
fused = True
searched = False
searched_with_slices = False


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError for another placement than the V."""
    lanes = require_vee("1F1B-V", problem)
    return make_schedule(name, problem, pull_actions(block(lanes), problem.microbatches, problem.slices))


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches + 1, 4 * lanes // 3)


def block(lanes: int) -> BuildingBlock:
    """Return the block. Forwards hop one slot. Backwards hop two and, every third lane, five, so that on each lane two
    B's of two slots find two free pairs of slots beside the forwards."""
    d = lanes
    first = 2 * d + (3 if d % 3 == 0 else 0)
    backward = [first + 2 * j + 3 * ((j + (1 - d) % 3) // 3) for j in range(2 * d)]
    return BuildingBlock(
        placement=vee_placement(d), interval=6, forward=tuple(range(2 * d)), backward=tuple(reversed(backward))
    )
