"""One candidate, costed and simulated: what decides in every search."""

from __future__ import annotations

from dataclasses import replace

from pipefit.cost.memory.lanes import lane_limits
from pipefit.cost.pipeline.contention import Pipelines
from pipefit.cost.types import CostTable
from pipefit.cost.work import PipelineWork
from pipefit.plan.assemble.order import computed_schedule, frozen_in, order_problem
from pipefit.plan.assemble.pipeline_work import Parts, pipeline_work
from pipefit.plan.assemble.predict import Simulation
from pipefit.plan.evaluate.outcome import Evaluated
from pipefit.plan.evaluate.planner_context import Workbench
from pipefit.plan.evaluate.port_contention import shared_costs
from pipefit.plan.request.decisions import Decisions
from pipefit.plan.request.module_decisions import ModuleDecisions
from pipefit.schedule.actions import Schedule
from pipefit.schedule.families import family
from pipefit.schedule.modules.inline import inline_order
from pipefit.schedule.modules.multiplexed import multiplexed
from pipefit.simulate import simulate


def evaluate(bench: Workbench, decisions: Decisions, parts: Parts, schedule: Schedule | None = None) -> Evaluated:
    """Cost and simulate one candidate, in the order of its family, or in that of `schedule`."""
    work = pipeline_work(parts, bench.programs)
    costs = shared_costs(bench, work)
    if schedule is None:
        schedule = _ordered(bench, decisions, parts, costs)
    return simulated(bench, decisions, parts, work, costs, schedule)


def _ordered(bench: Workbench, decisions: Decisions, parts: Parts, costs: CostTable) -> Schedule:
    """The order of the family, with what takes turns beside it, or lies in line on its lanes."""
    if not isinstance(decisions, ModuleDecisions) or not decisions.placed:
        return computed_schedule(decisions.schedule, parts, costs)
    if not decisions.guests:
        return inline_order(family(decisions.schedule).build, order_problem(parts, costs))
    return multiplexed(
        family(decisions.schedule).build,
        order_problem(parts, costs),
        decisions.beside,
        window=decisions.ahead,
        frozen=frozen_in(len(parts.stages), parts.edges, bench.parameters(parts, decisions)),
    )


def simulated(
    bench: Workbench,
    decisions: Decisions,
    parts: Parts,
    work: PipelineWork,
    costs: CostTable,
    schedule: Schedule,
    alone: Pipelines | None = None,
) -> Evaluated:
    """Simulate one candidate: this order, lowered where it is not, under its own costs, with what its transfers share.
    `alone`: its pipelines, where they are known."""
    lowered = schedule if schedule.is_lowered else bench.lowered(parts, decisions, schedule, costs)
    costs = shared_costs(bench, work, costs, alone)
    timeline = simulate(lowered, costs)
    cuts = tuple(stage.layers[0] for stage in parts.stages[1:])
    return Evaluated(
        decisions=replace(decisions, cuts=cuts),
        parts=parts,
        simulation=Simulation(timeline, costs, work, lane_limits(work, bench.network)),
    )
