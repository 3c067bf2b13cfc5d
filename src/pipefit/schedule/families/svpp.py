"""SVPP: slices, interleaved stages, and only the forwards ahead that keep the lanes busy (MEPipe's sequence virtual
pipeline parallelism, 2025, EuroSys).

The order is that of interleaved 1F1B, with one forward ahead less for every following lane. In unit time it takes
equally long, (m v s + d - 1)(f + b). The first lane holds v max(d, s) + min(d, s) - 1 slices of a stage, if d divides m
s and one of d and s divides the other. Without slices that is the memory of 1F1B, for any number of stages per lane.
Slow transfers stall it more than interleaved 1F1B, whose additional memory covers them.
"""

from __future__ import annotations

from pipefit.schedule.actions import Schedule
from pipefit.schedule.families.interleaved_1f1b import build_interleaved, placement
from pipefit.schedule.problem import ScheduleProblem

__all__ = ["build", "name", "placement"]

name = "svpp"
searched = False
searched_with_slices = True


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError unless the stages lie on the lanes in turn."""
    return build_interleaved(name, problem, hop=1, title="SVPP")
