"""fit: the best order that a search finds for the problem's own times, on any placement, in any memory limit.

Without costs it fits to one second for F, I and W each. See `pipefit.schedule.fit`.
"""

from __future__ import annotations

from dataclasses import replace

from pipefit.schedule.actions import Schedule
from pipefit.schedule.problem import ScheduleProblem, uniform_costs

name = "fit"
searched = False


def build(problem: ScheduleProblem) -> Schedule:
    """The computed schedule. Raises ScheduleError where the limit is below what any schedule needs."""
    from pipefit.schedule.fit.search import fit_schedule

    if problem.costs is None:
        problem = replace(problem, costs=uniform_costs(problem.placement, problem.stage_edges), limit_bytes=None)
    return fit_schedule(problem).schedule
