"""The family `fit`: the best schedule that a search finds for the problem's own times, placement and memory limits.

Without costs it fits to one second for F, I and W each. See `pipefit.schedule.fit`.
"""

from __future__ import annotations

from dataclasses import replace

from pipefit.schedule.actions import Schedule
from pipefit.schedule.problem import ScheduleProblem, uniform_costs

FIT = "fit"
"""The name of this family, and of every order that was fitted."""

name = FIT
searched = False
searched_with_slices = False
shown_in_trade = False
is_fitted = True


def build(problem: ScheduleProblem) -> Schedule:
    """Build the computed schedule. Raises ScheduleError if no schedule fits in the limit."""
    from pipefit.schedule.fit.search import fit_schedule

    if problem.costs is None:
        problem = replace(problem, costs=uniform_costs(problem.placement, problem.stage_edges), limit_bytes=None)
    return fit_schedule(problem).schedule
