"""SVPP: slices, interleaved stages, and no more forwards ahead than keep the lanes busy (MEPipe's sequence virtual
pipeline parallelism, 2025, EuroSys).

The order is that of interleaved 1F1B, but every lane runs one forward less ahead for every lane behind it. In unit
time it takes as long, (m v s + d - 1)(f + b), and the first lane holds v max(d, s) + min(d, s) - 1 slices of a stage,
where d divides m s and one of d and s the other. Without slices that is the memory of 1F1B, however many stages a lane
has. Transfers that take long stall it more: interleaved 1F1B spends its memory on them.
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
    """The computed schedule. Raises ScheduleError where stages do not lie on the lanes in turn."""
    return build_interleaved(name, problem, hop=1, title="SVPP")
