"""Costs and simulation of one candidate, the basis of every search."""

from __future__ import annotations

from dataclasses import replace

from pipefit.cost.memory.lanes import lane_limits
from pipefit.cost.pipeline.contention import PipelineCosts
from pipefit.cost.types import CostTable
from pipefit.cost.work import PipelineWork
from pipefit.plan.assemble.order import computed_schedule, find_frozen_stages, order_problem
from pipefit.plan.assemble.pipeline_work import PlanSkeleton, pipeline_work
from pipefit.plan.assemble.predict import PlanSimulation
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.port_contention import contended_costs
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.module_decisions import MultiModuleConfig
from pipefit.schedule.actions import Schedule
from pipefit.schedule.families import find_family
from pipefit.schedule.modules.inline import inline_order
from pipefit.schedule.modules.multiplexed import multiplex_stages
from pipefit.simulate import simulate_schedule


def evaluate_candidate(
    context: PlannerContext, decisions: ParallelConfig, parts: PlanSkeleton, schedule: Schedule | None = None
) -> EvaluatedPlan:
    """Cost and simulate one candidate, in the order of its family or of `schedule`."""
    work = pipeline_work(parts, context.programs)
    costs = contended_costs(context, work)
    if schedule is None:
        schedule = _order_candidate(context, decisions, parts, costs)
    return simulate_candidate(context, decisions, parts, work, costs, schedule)


def _order_candidate(
    context: PlannerContext, decisions: ParallelConfig, parts: PlanSkeleton, costs: CostTable
) -> Schedule:
    """Return the order of the family, with guest modules interleaved or inline modules on its lanes."""
    if not isinstance(decisions, MultiModuleConfig) or not decisions.shared_modules:
        return computed_schedule(decisions.schedule, parts, costs)
    if not decisions.guests:
        return inline_order(find_family(decisions.schedule).build, order_problem(parts, costs))
    return multiplex_stages(
        find_family(decisions.schedule).build,
        order_problem(parts, costs),
        decisions.guest_stages,
        window=decisions.ahead,
        frozen=find_frozen_stages(len(parts.stages), parts.edges, context.plan_parameters(parts, decisions)),
    )


def simulate_candidate(
    context: PlannerContext,
    decisions: ParallelConfig,
    parts: PlanSkeleton,
    work: PipelineWork,
    costs: CostTable,
    schedule: Schedule,
    alone: PipelineCosts | None = None,
) -> EvaluatedPlan:
    """Simulate one candidate in this order, lowered if necessary, with its costs and shared links, and count it.
    `alone` are its separate pipelines, if known."""
    return context.tracker.count_plan(simulate_order(context, decisions, parts, work, costs, schedule, alone))


def simulate_order(
    context: PlannerContext,
    decisions: ParallelConfig,
    parts: PlanSkeleton,
    work: PipelineWork,
    costs: CostTable,
    schedule: Schedule,
    alone: PipelineCosts | None = None,
) -> EvaluatedPlan:
    """Return `simulate_candidate` without counting it: for parts of a candidate, such as its first microbatches."""
    lowered = schedule if schedule.is_lowered else context.lower_order(parts, decisions, schedule, costs)
    costs = contended_costs(context, work, costs, alone)
    timeline = simulate_schedule(lowered, costs)
    cuts = tuple(stage.layers[0] for stage in parts.stages[1:])
    return EvaluatedPlan(
        decisions=replace(decisions, cuts=cuts),
        parts=parts,
        simulation=PlanSimulation(timeline, costs, work, lane_limits(work, context.network)),
    )
