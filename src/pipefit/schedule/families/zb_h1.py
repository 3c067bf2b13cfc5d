"""ZB-H1: 1F1B with the backward split into I and W, and W delayed to fill the end (Qi et al. 2024, arXiv 2401.10241,
section 3.1).

Every lane of d holds d microbatches, the peak of the first lane of 1F1B. With equal stages it idles (d - 1)(F + I - W)
instead of (d - 1)(F + I + W): lane i delays its W's by i microbatches.
"""

from __future__ import annotations

import numpy as np

from pipefit.cost.types import Array
from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.building_block import BuildingBlock
from pipefit.schedule.families._blocks import block_for_dag, make_schedule, repeat_actions
from pipefit.schedule.families._units import warm_up_units
from pipefit.schedule.problem import ScheduleProblem, linear_placement

name = "zb-h1"
searched_with_modules = True
more_guest_units_ahead = (2, 4)


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError if a lane holds several stages."""
    dag_block = block_for_dag("ZB-H1", problem, block)
    return make_schedule(name, problem, repeat_actions(dag_block, problem.microbatches, problem.slices))


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches, lanes - lane)


def warm_up(lane: int, lanes: int, stages_per_lane: int, microbatches: int, slices: int) -> int:
    """Return the forward units before the first backward, as in 1F1B."""
    return warm_up_units(1, lane, lanes, stages_per_lane, microbatches, slices)


def idle(lanes: int | Array, forward_s: Array, input_s: Array, weight_s: Array) -> Array:
    """Return the idle time of equal stages, (d - 1)(F + I - W)."""
    return (lanes - 1) * np.maximum(0.0, forward_s + input_s - weight_s)


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
