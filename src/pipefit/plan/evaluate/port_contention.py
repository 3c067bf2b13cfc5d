"""Candidates as the search sees them: every pipeline at its own pace, and ports that transfers share.

Where replicas go at their own pace, a step can be shorter than that of replicas in step; where transfers share ports,
it can be longer. So the bound of a candidate's cost table is that of its slowest pipeline alone: sharing only delays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipefit.cost.pipeline.contention import PipelineCosts, with_contention
from pipefit.cost.pipeline.table import cost_table
from pipefit.cost.types import CostTable
from pipefit.cost.work import PipelineWork
from pipefit.plan.bounds.step_bounds import table_bound_s
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.simulate import simulate_schedule


def contended_costs(
    bench: PlannerContext,
    work: PipelineWork,
    costs: CostTable | None = None,
    alone: PipelineCosts | None = None,
) -> CostTable:
    """The cost table of this work with what transfers share. `costs` and its pipelines `alone`, if they are known."""
    if costs is None:
        costs = cost_table(work, bench.network, bench.layers)
    if costs.contention is not None:
        return costs
    return with_contention(costs, work, bench.network, bench.layers, alone)


def slowest_pipeline_bound_s(alone: PipelineCosts, placement: Sequence[int], microbatches: int, schedule: str) -> float:
    """The least simulated time of a lowered schedule of that family with what transfers share, for a chain of stages:
    that of its slowest pipeline, were it alone."""
    return max(table_bound_s(table, placement, microbatches, schedule) for table in alone.tables)


def without_contention(one: EvaluatedPlan) -> EvaluatedPlan:
    """The candidate as the plain simulator has it: all replicas in step, every lane with a port of its own."""
    simulation = one.simulation
    costs = replace(simulation.costs, contention=None)
    timeline = simulate_schedule(simulation.timeline.schedule, costs)
    return replace(one, simulation=replace(simulation, costs=costs, timeline=timeline))
