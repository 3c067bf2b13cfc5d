"""DualPipeV: DeepSeek's DualPipe folded into a V, with one copy of the parameters instead of two (Li et al. 2025,
https://github.com/deepseek-ai/DualPipe; "cut in half" by Qi et al.).

Forwards and backwards of a lane's two stages are adjacent, so that the communication of one can overlap with the
compute of the other; here they run one after the other. Every lane of d holds 2 d + 1 stage-microbatches. At least 2 d
microbatches are required.
"""

from __future__ import annotations

from functools import lru_cache

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Schedule
from pipefit.schedule.blocks.passes import TimedPass
from pipefit.schedule.blocks.reorder import Sort
from pipefit.schedule.families._blocks import Named, actions_in_order, make_schedule, require_vee
from pipefit.schedule.problem import ScheduleProblem, vee_placement

name = "dualpipe-v"
placement = vee_placement
searched = False
searched_with_slices = False


def least_units(lanes: int) -> int:
    """Return the minimum of microbatches times slices: two for every lane."""
    return 2 * lanes


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError for another placement than the V, and for too few
    microbatches."""
    depth = require_vee("DualPipeV", problem)
    if problem.microbatches * problem.slices < least_units(depth):
        raise ScheduleError(
            "DualPipeV needs two microbatches (or slices of them) for every lane.",
            where="microbatches",
            seen=f"{problem.microbatches} microbatches"
            + (f" of {problem.slices} slices" if problem.slices > 1 else "")
            + f" on {depth} lanes",
            allowed=f"at least {-(-least_units(depth) // problem.slices)} microbatches",
            next_step="use more microbatches, or v-zb, which takes any number",
        )
    return make_schedule(name, problem, _lane_orders(depth, problem.microbatches, problem.slices))


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches + 1, 2 * lanes)


@lru_cache(maxsize=64)
def _lane_orders(depth: int, microbatches: int, slices: int) -> Named:
    units = microbatches * slices
    return actions_in_order(tuple(_lane_order(i, depth, units) for i in range(depth)), vee_placement(depth), slices)


def _lane_order(i: int, depth: int, units: int) -> tuple[TimedPass, ...]:
    """Return the order of lane i, in the eight steps of DeepSeek's code."""
    down, up = i, 2 * depth - 1 - i
    after, upto = depth - 1 - i, i + 1
    order: list[Sort] = [("F", down)] * (2 * after)
    order += [("F", down), ("F", up)] * upto
    order += [("I", up), ("W", up), ("F", up)] * after
    order += [("F", down), ("B", up), ("F", up), ("B", down)] * (units - 2 * depth + upto)
    order += [("B", up), ("F", up), ("B", down)] * after
    tail: list[Sort] = [("B", up), ("B", down)] * upto
    fused = 2 * (upto // 2) + (0 if i % 2 else 1)
    late: list[Sort] = [("I", stage) for _, stage in tail[fused:]]
    order += tail[:fused] + late
    pending = [stage for _, stage in late]
    for _ in range(after):
        order += [("W", pending.pop(0)), ("I", down)]
        pending.append(down)
    order += [("W", stage) for stage in pending]
    return _number_units(order)


def _number_units(order: list[Sort]) -> tuple[TimedPass, ...]:
    """Number the units over I and B together, because only some backwards of a stage are split; a W has the unit of its
    I."""
    split: dict[int, list[int]] = {}
    counts: dict[tuple[bool, int], int] = {}
    passes = []
    for kind, stage in order:
        if kind == "W":
            unit = split[stage].pop(0)
        else:
            unit = counts.get((kind == "F", stage), 0)
            counts[kind == "F", stage] = unit + 1
            if kind == "I":
                split.setdefault(stage, []).append(unit)
        passes.append(TimedPass(0, kind, stage, unit))
    return tuple(passes)
