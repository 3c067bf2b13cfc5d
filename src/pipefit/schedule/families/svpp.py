"""SVPP: slices, interleaved stages, and only the forwards ahead that keep the lanes busy (MEPipe's sequence virtual
pipeline parallelism, 2025, EuroSys).

The order is that of interleaved 1F1B, with one forward ahead less for every following lane. In unit time it takes
equally long, (m v s + d - 1)(f + b). The first lane holds v max(d, s) + min(d, s) - 1 slices of a stage, if d divides m
s and one of d and s divides the other. Without slices that is the memory of 1F1B, for any number of stages per lane.
Slow transfers stall it more than interleaved 1F1B, whose additional memory covers them.
"""

from __future__ import annotations

from pipefit.schedule.actions import Schedule
from pipefit.schedule.families._units import warm_up_units
from pipefit.schedule.families.interleaved_1f1b import build_interleaved
from pipefit.schedule.problem import ScheduleProblem, looped_placement

name = "svpp"
placement = looped_placement
fused = True
searched = False


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError unless the stages lie on the lanes in turn."""
    return build_interleaved(name, problem, hop=1, title="SVPP")


def in_flight(lane: int, lanes: int, stages_per_lane: int, microbatches: int) -> int:
    """Return the least number of stage-microbatches that a lane holds at once."""
    return min(microbatches * stages_per_lane, (stages_per_lane - 1) * min(microbatches, lanes) + lanes - lane)


def warm_up(lane: int, lanes: int, stages_per_lane: int, microbatches: int, slices: int) -> int:
    """Return the forward units before the first backward: one forward ahead for every following lane."""
    return warm_up_units(1, lane, lanes, stages_per_lane, microbatches, slices)
