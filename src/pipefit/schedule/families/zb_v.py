"""ZB-V: the handcrafted V schedule without bubbles in unit time (Qi et al. 2024, arXiv 2401.10241, section 6; the order
that PyTorch ships as ZBVZeroBubble).

Every lane of d holds 2 d stage-microbatches. With at least 2 d - 1 microbatches and equal times of F, I and W, no lane
idles between its first and its last action. With fewer, it is the schedule of 2 d - 1 without the missing microbatches.
V-ZB has the same peak and a smaller bubble with few microbatches.
"""

from __future__ import annotations

from functools import lru_cache

from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.passes import TimedPass, number_passes
from pipefit.schedule.blocks.reorder import Sort
from pipefit.schedule.families._blocks import Named, actions_in_order, make_schedule, require_vee
from pipefit.schedule.problem import ScheduleProblem, vee_placement

name = "zb-v"
placement = vee_placement


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError for another placement than the V."""
    return make_schedule(
        name, problem, _lane_orders(require_vee("ZB-V", problem), problem.microbatches, problem.slices)
    )


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches + 1, 2 * lanes)


@lru_cache(maxsize=64)
def _lane_orders(depth: int, microbatches: int, slices: int) -> Named:
    units = microbatches * slices
    return actions_in_order(tuple(_lane_order(i, depth, units) for i in range(depth)), vee_placement(depth), slices)


def _lane_order(i: int, depth: int, units: int) -> tuple[TimedPass, ...]:
    """Return the order of lane i: fill, then (F I W) of the way down and of the way up in turn, then the remaining I's
    followed by their W's."""
    full_units = max(units, 2 * depth - 1)
    down, up = i, 2 * depth - 1 - i

    def forward_and_backward(stage: int) -> list[Sort]:
        return [("I", stage), ("W", stage)]

    def add_cycle(stage: int) -> list[Sort]:
        return [("F", stage), *forward_and_backward(stage)]

    early = 2 * depth - 1 - i
    order: list[Sort] = [("F", down)] * (2 * (depth - i) - 1)
    order += [("F", up), ("F", down)] * i
    order += add_cycle(up) * (depth - i)
    order += [*add_cycle(down), *add_cycle(up)] * (full_units - early)
    order += [*forward_and_backward(down), *add_cycle(up)] * (early - depth)
    order += [("I", down), ("I", up)] * i
    order += forward_and_backward(down) * (depth - i)
    order += [("W", up)] * i
    order += [("W", down)] * i
    return tuple(timed_pass for timed_pass in number_passes(order) if timed_pass.unit < units)
