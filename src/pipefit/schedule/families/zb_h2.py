"""ZB-H2: enough forwards ahead that a pipeline of equal stages has no bubble (Qi et al. 2024, arXiv 2401.10241, section
3.2).

Every lane of d holds 2 d - 1 microbatches and idles (d - 1)(F + I - 2 W) between its first and its last action. The
lanes end one after the other; the paper lets the next step begin before the last lane has ended, which a global
gradient norm does not allow.
"""

from __future__ import annotations

import numpy as np

from pipefit.cost.types import Array
from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock
from pipefit.schedule.families._blocks import block_for_dag, make_schedule, repeat_actions
from pipefit.schedule.families._units import warm_up_units
from pipefit.schedule.problem import ScheduleProblem, linear_placement

name = "zb-h2"


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError if a lane holds several stages."""
    dag_block = block_for_dag("ZB-H2", problem, block)
    return make_schedule(name, problem, repeat_actions(dag_block, problem.microbatches, problem.slices))


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches, 2 * (lanes - lane) - 1)


def warm_up(lane: int, lanes: int, stages_per_lane: int, microbatches: int, slices: int) -> int:
    """Return the forward units before the first backward: two forwards ahead for every following lane."""
    return warm_up_units(2, lane, lanes, stages_per_lane, microbatches, slices)


def idle(lanes: int | Array, forward_s: Array, input_s: Array, weight_s: Array) -> Array:
    """Return the idle time of equal stages, (d - 1)(F + I - 2 W)."""
    return (lanes - 1) * np.maximum(0.0, forward_s + input_s - 2 * weight_s)


def block(lanes: int) -> BuildingBlock:
    """Return the block: lane i runs 2 (d - i) - 1 forwards before its first I; a W ends 3 (2 d - 1) slots after its F
    begins."""
    d = lanes
    return BuildingBlock(
        placement=linear_placement(d),
        interval=3,
        forward=tuple(2 * i for i in range(d)),
        backward=tuple(6 * d - 5 - 4 * i for i in range(d)),
        weight=tuple(6 * d - 4 + 2 * i for i in range(d)),
    )
