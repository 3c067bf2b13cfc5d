"""Eager 1F1B: 1F1B with twice as many warm-up forwards, so that transfers overlap with compute (Zhuang et al. 2022,
arXiv 2211.05322, section 4).

A gradient that is delayed by a transfer at every stage finds other work in the meantime. Stage i of d holds min(m s, 2
(d - 1 - i) + s) slices; without transfer times, the time is that of 1F1B.
"""

from __future__ import annotations

from pipefit.schedule.actions import Schedule
from pipefit.schedule.families._units import warm_up_units
from pipefit.schedule.families.one_f_one_b import build_ahead
from pipefit.schedule.problem import ScheduleProblem

name = "eager-1f1b"
fused = True
searched = False
searched_with_modules = True
guest_units_ahead = (2,)
more_guest_units_ahead = (4,)


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError if a lane holds several stages."""
    return build_ahead(name, problem, hop=2)


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches, 2 * (lanes - 1 - lane) + 1)


def warm_up(lane: int, lanes: int, stages_per_lane: int, microbatches: int, slices: int) -> int:
    """Return the forward units before the first backward: two forwards ahead for every following lane."""
    return warm_up_units(2, lane, lanes, stages_per_lane, microbatches, slices)
