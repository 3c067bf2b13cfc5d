"""Costs of a candidate with its replicas at independent speeds, and with transfers that share ports.

Replicas at independent speeds can make a step shorter than replicas in lockstep; shared ports can make it longer. So a
candidate's bound is that of its slowest pipeline alone: sharing only adds delay.
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
    context: PlannerContext,
    work: PipelineWork,
    costs: CostTable | None = None,
    alone: PipelineCosts | None = None,
) -> CostTable:
    """Return the cost table of this work with shared links. `costs` and the separate pipelines `alone` are passed if
    known."""
    if costs is None:
        costs = cost_table(work, context.network, context.layers)
    if costs.contention is not None:
        return costs
    return with_contention(costs, work, context.network, context.layers, alone)


def slowest_pipeline_bound_s(alone: PipelineCosts, placement: Sequence[int], microbatches: int, schedule: str) -> float:
    """Return a lower bound of the simulated time of a lowered schedule of this family, for a chain of stages with
    shared links.

    It is the bound of the slowest pipeline alone.
    """
    return max(table_bound_s(table, placement, microbatches, schedule) for table in alone.tables)


def without_contention(one: EvaluatedPlan) -> EvaluatedPlan:
    """Return the candidate as the plain simulator times it: replicas in lockstep, and a separate port for every
    lane."""
    simulation = one.simulation
    costs = replace(simulation.costs, contention=None)
    timeline = simulate_schedule(simulation.timeline.schedule, costs)
    return replace(one, simulation=replace(simulation, costs=costs, timeline=timeline))
