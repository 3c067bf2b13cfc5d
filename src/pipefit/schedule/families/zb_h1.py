"""ZB-H1: 1F1B with the backward split into I and W, and W delayed to fill the end (Qi et al. 2024, arXiv 2401.10241,
section 3.1).

Every lane of d holds d microbatches, the peak of the first lane of 1F1B. With equal stages it idles (d - 1)(F + I - W)
instead of (d - 1)(F + I + W): lane i delays its W's by i microbatches.
"""

from __future__ import annotations

from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock
from pipefit.schedule.families._blocks import block_for_dag, make_schedule, repeat_actions
from pipefit.schedule.problem import ScheduleProblem, linear_placement

name = "zb-h1"


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError if a lane holds several stages."""
    dag_block = block_for_dag("ZB-H1", problem, block)
    return make_schedule(name, problem, repeat_actions(dag_block, problem.microbatches, problem.slices))


def block(lanes: int) -> BuildingBlock:
    """Return the forwards and backwards of 1F1B, with a W 3 d slots after the F on every lane."""
    d = lanes
    return BuildingBlock(
        placement=linear_placement(d),
        interval=3,
        forward=tuple(range(d)),
        backward=tuple(3 * d - 2 - 2 * i for i in range(d)),
        weight=tuple(3 * d - 1 + i for i in range(d)),
    )
