"""In which order: actions, schedule families, lowering, checks, CSV."""

from pipefit.schedule.actions import Action, Schedule, format_lanes, parse_lanes
from pipefit.schedule.check.deadlock import check_deadlock, find_deadlock
from pipefit.schedule.check.rules import check
from pipefit.schedule.families import FAMILIES, family, register_family
from pipefit.schedule.fit import family as _fit_family
from pipefit.schedule.lowering.lower import lower
from pipefit.schedule.problem import Edge, Problem, chain, linear, uniform_costs, vee

__all__ = [
    "FAMILIES",
    "Action",
    "Edge",
    "Problem",
    "Schedule",
    "chain",
    "check",
    "check_deadlock",
    "family",
    "find_deadlock",
    "format_lanes",
    "linear",
    "lower",
    "parse_lanes",
    "register_family",
    "uniform_costs",
    "vee",
]

register_family(_fit_family)
