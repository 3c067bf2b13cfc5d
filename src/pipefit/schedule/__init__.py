"""Pipeline schedules: the order of actions on every lane, schedule families, lowering, checks, CSV."""

from pipefit.schedule.actions import Action, Schedule, format_lanes, parse_lanes
from pipefit.schedule.check.deadlock import check_deadlock, find_deadlock
from pipefit.schedule.check.rules import check_schedule
from pipefit.schedule.families import FAMILIES, ScheduleFamily, find_family, register_family, remove_family
from pipefit.schedule.fit import family as _fit_family
from pipefit.schedule.lowering.lower import lower_schedule
from pipefit.schedule.problem import Edge, ScheduleProblem, chain_edges, linear_placement, uniform_costs, vee_placement

__all__ = [
    "FAMILIES",
    "Action",
    "Edge",
    "Schedule",
    "ScheduleFamily",
    "ScheduleProblem",
    "chain_edges",
    "check_deadlock",
    "check_schedule",
    "find_deadlock",
    "find_family",
    "format_lanes",
    "linear_placement",
    "lower_schedule",
    "parse_lanes",
    "register_family",
    "remove_family",
    "uniform_costs",
    "vee_placement",
]

register_family(_fit_family)
