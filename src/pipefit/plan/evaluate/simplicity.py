"""The choice among simulated plans whose steps are about equal: the simplest, by a stated order.

A simple plan is easier to understand and to debug, and differences of one per cent are below the error of a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipefit.errors import PlanError
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.plan_kinds import parallel_axes, uses_groups
from pipefit.schedule.fit.family import FIT

TOLERANCE = 0.01
"""Default fraction by which the chosen plan may be slower than the fastest."""

LARGEST_TOLERANCE = 0.5
"""Tolerances from here on are refused: `1` is a percentage without its sign."""


class PlanSimplicity(NamedTuple):
    """The order of plans from simple to clever: the first field that differs decides."""

    sliced: bool
    "Sequences are cut into slices."
    fitted: bool
    "The order of actions is fitted, and no schedule family's."
    uneven: bool
    "Replicas or shards have unequal shares, or lanes differ in their groups or programs."
    axes: int
    "Number of axes with more than one part: data, expert, context, tensor, pipeline."
    memory_percent: int
    "Whole per cent of the memory used on the fullest device. Smaller differences do not count."


LESS_SIMPLE = ("token slices", "a fitted order", "uneven shares or groups", "more parallel axes", "more memory")
"""For every field of `PlanSimplicity`, the feature of a plan that is behind in it."""


def plan_simplicity(plan: EvaluatedPlan) -> PlanSimplicity:
    """Return the place of a plan of one module in the order from simple to clever."""
    decisions = plan.decisions
    return PlanSimplicity(
        sliced=len(decisions.slices) > 1,
        fitted=decisions.schedule == FIT,
        uneven=_is_uneven(decisions),
        axes=len(parallel_axes(decisions)),
        memory_percent=int(100 * plan.peak_bytes / plan.limit_bytes),
    )


def _is_uneven(decisions: ParallelConfig) -> bool:
    return uses_groups(decisions) or any(len({*shares}) > 1 for shares in (decisions.replicas, decisions.shards))


def choose_simplest(plans: Sequence[EvaluatedPlan], tolerance: float, fastest_s: float = float("inf")) -> EvaluatedPlan:
    """Return the simplest plan within the tolerance of the fastest; the fastest of equally simple ones.

    `fastest_s` is the step time of a faster plan that is no choice. With a tolerance of 0 the fastest plan is returned.
    """
    fastest = min(plans, key=lambda plan: plan.rank_key)
    if not tolerance:
        return fastest
    longest_s = min(fastest.step_s, fastest_s) * (1 + tolerance)
    near = [plan for plan in plans if plan.step_s <= longest_s]
    return min(near, key=lambda plan: (plan_simplicity(plan), plan.rank_key), default=fastest)


def less_simple_by(plan: EvaluatedPlan, chosen: EvaluatedPlan) -> str:
    """Return the feature that makes a plan less simple than the chosen one; '' if it is as simple or simpler."""
    for name, value, chosen_value in zip(LESS_SIMPLE, plan_simplicity(plan), plan_simplicity(chosen), strict=True):
        if value != chosen_value:
            return name if value > chosen_value else ""
    return ""


def parse_tolerance(text: str) -> float:
    """Return a tolerance from `0.01` or `1%`. Raises PlanError for another text, and for values out of bounds."""
    number = text.strip()
    try:
        tolerance = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        tolerance = -1.0
    return check_tolerance(tolerance, text)


def check_tolerance(tolerance: float, seen: object) -> float:
    """Return the tolerance. Raises PlanError if it is not a fraction from 0 to below `LARGEST_TOLERANCE`."""
    if not 0 <= tolerance < LARGEST_TOLERANCE:
        raise PlanError(
            "This is not a valid tolerance.",
            where="--tolerance",
            seen=repr(seen),
            allowed=f"a fraction from 0 to below {LARGEST_TOLERANCE}, such as 0.01, or a percentage, such as 1%; "
            "0 is the fastest plan",
        )
    return tolerance
