"""Plans of groups with sliced sequences: the layouts simulated without slices get slices afterwards.

Slices shorten the pipeline bubble, so a layout that lost without them may win with them. Its groups, programs and
microbatches are kept; the slices are those of `plan/passes/reslice.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.device_groups.group_budget import GROUP_BUDGET
from pipefit.plan.passes.reslice import reslice_best
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job

NO_RESULT = SearchResult(fitting=(), misfits=(), unfit=0, lower_bound_s=0, open_bound_s=0, considered=0, simulated=0)


def with_slices(
    context: PlannerContext, job: Job, constraints: Constraints, made: Sequence[EvaluatedPlan], best_s: float
) -> tuple[list[EvaluatedPlan], int]:
    """Return (the layouts of `made` with slices that are faster than without, number of simulations).

    Layouts whose step time excluding the pipeline bubble is not below `best_s` are left out.
    """
    if context.network.devices > GROUP_BUDGET.slicing_devices:
        return [], 0
    promising = [plan for plan in made if plan.decisions.lane_count > 1 and _full_s(plan) < best_s]
    faster, simulated = [], 0
    layouts: set[tuple[int, ...]] = set()
    for plan in sorted(promising, key=_full_s):
        if plan.decisions.devices in layouts or len(layouts) == GROUP_BUDGET.sliced_layouts:
            continue
        layouts.add(plan.decisions.devices)
        fixed = replace(constraints, microbatches=plan.decisions.microbatches, shards=max(_lane_shards(plan), key=sum))
        again = reslice_best(context, job, fixed, replace(NO_RESULT, fitting=(plan,)))
        simulated += again.simulated
        faster += [again.fitting[0]] if again.fitting[0] is not plan else []
    return faster, simulated


def _full_s(one: EvaluatedPlan) -> float:
    """Return the step time excluding the pipeline bubble."""
    count = one.decisions.microbatches
    return one.step_s * count / (count + one.decisions.lane_count - 1)


def _lane_shards(one: EvaluatedPlan) -> list[tuple[int, ...]]:
    return [one.decisions.shards_of(lane) for lane in range(one.decisions.lane_count)]
