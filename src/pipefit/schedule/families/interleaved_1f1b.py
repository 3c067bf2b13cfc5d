"""Interleaved 1F1B: every lane holds several stages in turn, which shrinks the pipeline bubble (Narayanan et al. 2021,
arXiv 2104.04473, section 2.2; called virtual pipeline stages in Megatron-LM).

Stage s of d v stages lies on lane s mod d. The microbatches go in groups through the stages of a lane, one stage after
the other. A group is d microbatches, or a few more if d does not divide them evenly, so that any number of microbatches
is allowed. On equal stages with d dividing m the time is (m v + d - 1)(f + b), with f and b of one stage, and lane i of
d keeps min(m v, (v - 1) d + 2 (d - 1 - i) + 1) stage-microbatches alive. With one stage per lane it is 1F1B.

With s slices a group has max(d, s) slices, if d divides s or s divides d. The first lane then holds (v - 1) max(d, s) +
2 (d - 1) + s slices of a stage. With s >= d slices these are the v s + 2 (d - 1) of SlimPipe, of the d v s slices that
one sequence has (2025, arXiv 2504.14519). The time is (m v s + d - 1)(f + b), with f and b of one slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain as joined
from itertools import pairwise

from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Action, Schedule
from pipefit.schedule.families._units import warm_up_units
from pipefit.schedule.families.one_f_one_b import build as build_1f1b
from pipefit.schedule.problem import ScheduleProblem, looped_placement

name = "interleaved-1f1b"
placement = looped_placement
fused = True


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError unless the stages lie on the lanes in turn."""
    return build_interleaved(name, problem, hop=2, title="Interleaved 1F1B")


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(
        microbatches * stages_per_lane,
        (stages_per_lane - 1) * min(microbatches, lanes) + 2 * (lanes - 1 - lane) + 1,
    )


def warm_up(lane: int, lanes: int, stages_per_lane: int, microbatches: int, slices: int) -> int:
    """Return the forward units before the first backward, with the hop of `build`."""
    return warm_up_units(2 if stages_per_lane > 1 else 1, lane, lanes, stages_per_lane, microbatches, slices)


def build_interleaved(name: str, problem: ScheduleProblem, hop: int, title: str) -> Schedule:
    """Build interleaved 1F1B whose lanes run `hop` more forwards ahead for every lane between them and the last.

    With hop 1, the minimum, no lane waits for work if transfers take no time. Raises ScheduleError unless the stages
    lie on the lanes in turn.
    """
    turns = problem.num_stages // problem.num_lanes
    if turns == 1:
        lanes = build_1f1b(problem).lanes
    elif problem.placement == placement(problem.num_lanes, turns):
        groups = _microbatch_groups(problem)
        lanes = tuple(_lane_actions(lane, turns, groups, problem, hop) for lane in range(problem.num_lanes))
    else:
        raise ScheduleError(
            f"{title} is written for stages that lie on the lanes in turn.",
            where="placement",
            seen=",".join(map(str, problem.placement)),
            allowed=f"for example {','.join(map(str, placement(problem.num_lanes)))}",
            next_step="use gpipe, which takes any placement, or a schedule made for this placement",
        )
    return Schedule(
        name=name,
        placement=problem.placement,
        microbatches=problem.microbatches,
        slices=problem.slices,
        lanes=lanes,
    )


def _microbatch_groups(problem: ScheduleProblem) -> list[range]:
    """Return the runs of microbatches that pass a lane's stages together.

    A group has at least one unit for every lane, if there are enough, because it comes back to the first lane after one
    unit per lane.
    """
    least = math.ceil(problem.num_lanes / problem.slices)
    count = max(1, problem.microbatches // least)
    stops = [problem.microbatches * i // count for i in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(stops)]


def _lane_actions(
    lane: int, turns: int, groups: Sequence[range], problem: ScheduleProblem, hop: int
) -> tuple[Action, ...]:
    """Return a warm-up, then one forward and one backward in turn.

    The warm-up lasts until the first microbatch has passed the lane's other stages, plus the way to the last lane and
    back.
    """
    held, slices = problem.lane_stages(lane), problem.slices
    ahead = [Action("F", stage, m, k) for group in groups for stage in held for m in group for k in range(slices)]
    back = [
        Action("B", stage, m, k)
        for group in groups
        for stage in reversed(held)
        for m in group
        for k in reversed(range(slices))
    ]
    around = hop * (problem.num_lanes - 1 - lane)
    warm = min(len(ahead), (turns - 1) * max(map(len, groups)) * slices + around + slices - 1)
    steady = joined.from_iterable(zip(ahead[warm:], back, strict=False))
    return (*ahead[:warm], *steady, *back[len(ahead) - warm :])
