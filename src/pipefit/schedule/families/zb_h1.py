"""ZB-H1: 1F1B with the backward split into I and W, and W put off to fill the end (Qi et al. 2024, arXiv 2401.10241,
section 3.1).

Every lane of d holds d microbatches, the peak of 1F1B's first one. With equal stages it idles (d - 1)(F + I - W) in
place of (d - 1)(F + I + W): lane i puts its W's off by i microbatches.
"""

from __future__ import annotations

from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock
from pipefit.schedule.families._blocks import block_for_dag, make_schedule, repeat_actions
from pipefit.schedule.problem import ScheduleProblem, linear_placement

name = "zb-h1"


def build(problem: ScheduleProblem) -> Schedule:
    """The computed schedule. Raises ScheduleError where a lane holds several stages."""
    made = block_for_dag("ZB-H1", problem, block)
    return make_schedule(name, problem, repeat_actions(made, problem.microbatches, problem.slices))


def block(lanes: int) -> BuildingBlock:
    """The forwards and backwards of 1F1B, and a W 3 d slots after the F on every lane."""
    d = lanes
    return BuildingBlock(
        placement=linear_placement(d),
        interval=3,
        forward=tuple(range(d)),
        backward=tuple(3 * d - 2 - 2 * i for i in range(d)),
        weight=tuple(3 * d - 1 + i for i in range(d)),
    )
