"""Orders fitted to memory: for the most promising layouts, the best order within the memory that is left.

The search compares schedule families, each with a fixed memory requirement. Here a short list of its layouts (replicas,
lanes, microbatches, sharded state, device order, cuts) gets an order fitted to it (`pipefit.schedule.fit`), under
its own cost tables and the memory limits of its lanes; every stage chooses its activation recomputation. The simulator
decides on the lowered lanes, as for families. The budget counts moves, not seconds, so the plan is the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from pipefit.cost.memory.lanes import lane_limits
from pipefit.cost.memory.order_limits import order_limits
from pipefit.cost.pipeline.table import cost_table
from pipefit.cost.types import CostTable
from pipefit.cost.work import PipelineWork
from pipefit.errors import ScheduleError
from pipefit.model.analysis.saved import Recompute
from pipefit.plan.assemble.order import order_problem
from pipefit.plan.assemble.pipeline_work import PlanSkeleton, pipeline_work
from pipefit.plan.bounds.step_bounds import table_bound_s
from pipefit.plan.candidates.space import RECOMPUTE_CHOICES
from pipefit.plan.evaluate.evaluate import evaluate_candidate, simulate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.reslice import reslice_best
from pipefit.plan.passes.search import TIE, search_plans
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.schedule.fit.family import FIT
from pipefit.simulate import simulate_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingBudget:
    """Budgets of fitted orders. Actions are those of an order; they stand for the time of evaluating it."""

    step_slack: float = 0.1
    "A layout gets a fitted order if its family's step is at most this fraction longer than the best one."
    recut_placements: int = 3
    "Placements whose best plan is cut again if `schedule=fit` is constrained."
    recut_actions: int = 100_000
    "Actions of a layout above which its layers are not cut again: it takes as long as a simulation."
    bounded_layouts: int = 10
    "Layouts whose bounds are computed."
    layouts: int = 4
    "Maximum number of layouts that get fitted orders."
    total_actions: int = 5_000
    "Maximum number of actions of these layouts together."
    layout_actions: int = 3_000
    """Actions of a layout above which an order is fitted only if `schedule=fit` is constrained: with more of them, the
    moves affordable in planning gain next to nothing."""
    stage_recompute_actions: int = 1_000
    "Actions of a layout above which all stages keep the layout's recomputation instead of choosing their own."
    least_moves: int = 2_000
    "Minimum number of moves of a fit."
    most_moves: int = 20_000
    "Maximum number of moves of a fit."
    moved_actions: int = 15_000_000
    "Moves of a fit times its actions, between these limits. The time of a move grows with the actions."
    trial_divisor: int = 10
    "Every layout of the short list first gets the moves of a fit divided by this."
    trial_slack: float = 0.01
    "Layouts whose trial is at most this fraction longer than the best trial get all moves."
    refits: int = 4
    "Number of times an order is fitted again because lowering took memory that the fit did not count."


FITTING_BUDGET = FittingBudget()


def best_plans(
    context: PlannerContext,
    job: Job,
    constraints: Constraints = NO_CONSTRAINTS,
    top: int = 5,
    layouts: int = FITTING_BUDGET.layouts,
    first: SearchResult | None = None,
) -> SearchResult:
    """Return the result of the search (`first`, if it is known), with the fitted orders that beat it. With
    `schedule=fit`, all plans are named so."""
    first = first or search_plans(context, job, constraints, top)
    recut = _recut_best(context, job, constraints, first, min(layouts, FITTING_BUDGET.recut_placements))
    resliced = reslice_best(context, job, constraints, recut)
    fit_required = constraints.schedule == FIT
    if constraints.schedule not in (None, FIT):
        return resliced
    fitted: list[EvaluatedPlan] = []
    before = [plan.decisions for plan in first.fitting[:1] if plan not in resliced.fitting]
    listed = _short_list(context, job, constraints, resliced, layouts, before)
    for tables, look in _promising_choices(context, listed):
        best_s = min((plan.step_s for plan in (*resliced.fitting[:1], *fitted)), default=float("inf"))
        fits = (look, fit_layout(context, tables))
        plan = min((plan for plan in fits if plan is not None), key=lambda plan: plan.rank_key, default=None)
        if plan is not None and (fit_required or plan.step_s < best_s * (1 - TIE)):
            fitted.append(plan)
    family_plans = [relabel_fitted(plan) for plan in resliced.fitting] if fit_required else resliced.fitting
    fitting = _distinct_plans(sorted((*family_plans, *fitted), key=lambda plan: plan.rank_key))
    return replace(resliced, fitting=tuple(fitting), fitted=len(fitted))


def _promising_choices(
    context: PlannerContext, listed: Sequence[Listed]
) -> Sequence[tuple[list[FittingChoice], EvaluatedPlan | None]]:
    """Return the layouts of a short list that deserve the full number of moves.

    A fit with few moves and the layout's own recomputation ranks them: the best is kept, and those close to it.
    The plan of that fit is returned as well: with contention between transfers it is sometimes the better order,
    because a fit asks the plain simulator.
    """
    if len(listed) < 2:
        return [(tables, None) for tables, _ in listed]
    looks: list[tuple[float, list[FittingChoice], EvaluatedPlan | None]] = []
    for tables, own_choice in listed:
        best_s = min((step_s for step_s, _, _ in looks), default=float("inf"))
        if tables[0].bound_s < best_s:
            moves = moves_for(_action_count(own_choice.parts)) // FITTING_BUDGET.trial_divisor
            plan = fit_layout(context, [own_choice], moves=moves)
            looks.append((plan.step_s if plan is not None else float("inf"), tables, plan))
    best_s = min(step_s for step_s, _, _ in looks)
    return [(tables, plan) for step_s, tables, plan in looks if step_s <= best_s * (1 + FITTING_BUDGET.trial_slack)]


def _recut_best(
    context: PlannerContext, job: Job, constraints: Constraints, found: SearchResult, most: int
) -> SearchResult:
    """Return the result with a better cut of the best plan, where one is found for lanes of several stages.

    With `schedule=fit`, the best plan of `most` placements is cut again: orders are fitted to these cuts.
    """
    if constraints.cuts is not None:
        return found
    seen: set[tuple[int, ...]] = set()
    fitting = list(found.fitting)
    for index, plan in enumerate(found.fitting):
        if (placement := plan.decisions.lane_of_stage) in seen or len(seen) >= most:
            continue
        if _least_actions(plan.decisions) > FITTING_BUDGET.recut_actions:
            continue
        seen.add(placement)
        fitting[index] = _refine_cuts(context, job, plan)
        if constraints.schedule != FIT:
            break
    return replace(found, fitting=tuple(sorted(fitting, key=lambda plan: plan.rank_key)))


def _refine_cuts(context: PlannerContext, job: Job, one: EvaluatedPlan) -> EvaluatedPlan:
    """Return the plan with a better cut, or the plan itself if there is none."""
    free = replace(one.decisions, stages=one.decisions.stage_count, cuts=())
    parts = context.refine_skeleton(job, free, one.parts)
    if parts is one.parts:
        return one
    again = evaluate_candidate(context, one.decisions, parts)
    return again if again.simulation.fits_in_memory and again.step_s < one.step_s else one


def _distinct_plans(ranked: Sequence[EvaluatedPlan]) -> list[EvaluatedPlan]:
    """Return the first plan of every choice; plans that differ only in step time or cuts are one choice."""
    plans = {replace(plan.decisions, stages=plan.decisions.stage_count, cuts=()): plan for plan in reversed(ranked)}
    return sorted(plans.values(), key=lambda plan: plan.rank_key)


def recompute_choices(constraints: Constraints, layout: ParallelConfig) -> list[tuple[Recompute, ...]]:
    """Return the kinds of recomputation a layout may choose from; a choice that varies by stage is kept."""
    if constraints.recompute is not None:
        return [constraints.recompute]
    return [layout.recompute, *(recompute for recompute in RECOMPUTE_CHOICES if recompute != layout.recompute)]


@dataclass(frozen=True, slots=True)
class FittingChoice:
    """A layout with one kind of recomputation, ready to be fitted."""

    bound_s: float
    "Lower bound over all its orders, for any memory."
    decisions: ParallelConfig
    parts: PlanSkeleton
    work: PipelineWork
    costs: CostTable


Listed = tuple[list[FittingChoice], FittingChoice]
"""The choices of a layout, and the choice with its own recomputation."""


def tables_of(
    context: PlannerContext, job: Job, layout: ParallelConfig, recomputes: Sequence[tuple[Recompute, ...]]
) -> list[FittingChoice]:
    """Return the choices of a layout with cuts, sorted by their bounds."""
    choices = []
    for recompute in recomputes:
        decisions = replace(layout, schedule=FIT, recompute=recompute)
        parts = context.make_skeleton(job, decisions)
        work = pipeline_work(parts, context.programs)
        costs = cost_table(work, context.network, context.layers)
        choices.append(
            FittingChoice(table_bound_s(costs, parts.placement, parts.microbatches, FIT), decisions, parts, work, costs)
        )
    return sorted(choices, key=lambda choice: choice.bound_s)


def fit_layout(
    context: PlannerContext,
    tables: Sequence[FittingChoice],
    limits: Sequence[float] | None = None,
    moves: int | None = None,
) -> EvaluatedPlan | None:
    """Return the best order found for a layout, lowered and simulated; None if no order fits.

    Every stage picks its recomputation among the choices; if that finds no order, all stages use the same. `limits` are
    the bytes of every lane, by default those of its devices.
    """
    if limits is None:
        least = lane_limits(tables[0].work, context.network)
        limits = order_limits(tables[0].costs, tables[0].parts.placement, least)
    count = moves_for(_action_count(tables[0].parts)) if moves is None else moves
    plan = _fit_order(context, tables, limits, count)
    if plan is None and len(tables) > 1:
        alone = [fitted for table in tables if (fitted := _fit_order(context, [table], limits, count)) is not None]
        plan = min(alone, key=lambda fitted: fitted.rank_key, default=None)
    return plan


def _fit_order(
    context: PlannerContext, tables: Sequence[FittingChoice], limits: Sequence[float], moves: int
) -> EvaluatedPlan | None:
    """Return one order over all these choices of recomputation, fitted again with less memory if its transfers need
    some."""
    from pipefit.schedule.fit.search import fit_schedule

    room = list(limits)
    by_name: dict[str, CostTable] = {plan.decisions.recompute[0]: plan.costs for plan in tables}
    options = by_name if len(tables) > 1 else None
    for _ in range(FITTING_BUDGET.refits):
        try:
            fitted = fit_schedule(order_problem(tables[0].parts, tables[0].costs, room), moves=moves, options=options)
        except ScheduleError:
            return None
        choice = _choose_recompute(context, tables, fitted.recompute)
        plan = simulate_candidate(context, choice.decisions, choice.parts, choice.work, choice.costs, fitted.schedule)
        over = [float(peak) - limit for peak, limit in zip(plan.simulation.timeline.peak_bytes, limits, strict=True)]
        if max(over) <= 0:
            return plan
        room = [limit - max(0.0, more) for limit, more in zip(room, over, strict=True)]
    return None


def _choose_recompute(
    context: PlannerContext, tables: Sequence[FittingChoice], recompute: Sequence[str]
) -> FittingChoice:
    """Return the layout with the recomputation every stage chose."""
    if len(tables) == 1:
        return tables[0]
    for choice in tables:
        if {*recompute} == {*choice.decisions.recompute}:
            return choice
    stage_recompute = cast(tuple[Recompute, ...], tuple(recompute))
    return tables_of(context, tables[0].parts.job, tables[0].decisions, [stage_recompute])[0]


def moves_for(actions: int) -> int:
    """Return the number of moves of a fit with this number of actions."""
    moves = FITTING_BUDGET.moved_actions // max(actions, 1)
    return max(FITTING_BUDGET.least_moves, min(FITTING_BUDGET.most_moves, moves))


def affordable_choices(
    context: PlannerContext, job: Job, constraints: Constraints, layout: ParallelConfig
) -> Listed | None:
    """Return the choices of a layout that the budget of fitted orders allows; None if the layout is too large.

    All stages of a large layout keep the layout's recomputation.
    """
    if _least_actions(layout) > FITTING_BUDGET.layout_actions and constraints.schedule != FIT:
        return None
    if _least_actions(layout) > FITTING_BUDGET.stage_recompute_actions:
        own_choice = tables_of(context, job, layout, [layout.recompute])[0]
        return [own_choice], own_choice
    tables = tables_of(context, job, layout, recompute_choices(constraints, layout))
    return tables, next(table for table in tables if table.decisions.recompute == layout.recompute)


def _short_list(
    context: PlannerContext,
    job: Job,
    constraints: Constraints,
    found: SearchResult,
    most: int,
    before: Sequence[ParallelConfig],
) -> list[Listed]:
    """Return layouts whose bound leaves room for a gain, the most promising first.

    The best layout is always among them, also with its cut `before` refinement: even stages suit a fitted order better
    than a family's. The rest are layouts of the next families, and plans that would be faster but lack memory, ranked
    behind by the fraction they lack.
    """
    budget = FITTING_BUDGET
    best_s = found.fitting[0].step_s if found.fitting else float("inf")
    longest_s = best_s * (1 + budget.step_slack)
    sure = [*(entry.decisions for entry in found.fitting[:1]), *before]
    ready: list[tuple[float, int, Listed]] = []
    seen: set[ParallelConfig] = set()
    for step_s, lack, decisions in _score_layouts(found, best_s, before):
        key = replace(decisions, schedule=FIT, recompute=("none",), stages=decisions.stage_count, cuts=())
        key = replace(key, cuts=decisions.cuts) if decisions in before else key
        if (
            key in seen
            or len(seen) >= budget.bounded_layouts
            or (decisions.lane_count == 1 and constraints.schedule != FIT)
        ):
            continue
        seen.add(key)
        choices = affordable_choices(context, job, constraints, decisions)
        if choices is None:
            continue
        tables, own_choice = choices
        score = max(step_s, own_choice.bound_s) * lack
        if tables[0].bound_s < best_s and score <= longest_s:
            ready.append((0.0 if decisions in sure else score, len(ready), (tables, own_choice)))
    result: list[Listed] = []
    actions = 0
    for _, _, entry in sorted(ready, key=lambda entry: entry[:2]):
        result.append(entry)
        actions += _action_count(entry[1].parts)
        if len(result) >= most or actions >= budget.total_actions:
            break
    return result


def _score_layouts(
    found: SearchResult, best_s: float, before: Sequence[ParallelConfig]
) -> list[tuple[float, float, ParallelConfig]]:
    """Return (step or its bound, need of memory over the limit but at least 1, decisions), those that fit first."""
    longest_s = best_s * (1 + FITTING_BUDGET.step_slack)
    scored = [(entry.step_s, 1.0, entry.decisions) for entry in found.fitting if entry.step_s <= longest_s]
    scored += [(best_s, 1.0, decisions) for decisions in before]
    for misfit in found.misfits:
        if misfit.bound_s < best_s:
            scored.append((misfit.bound_s, max(1.0, misfit.peak_bytes / misfit.limit_bytes), misfit.decisions))
    return sorted(scored, key=lambda entry: (entry[1] > 1, entry[0] * entry[1]))


def _action_count(parts: PlanSkeleton) -> int:
    return 3 * len(parts.stages) * parts.microbatches * len(parts.slices)


def _least_actions(decisions: ParallelConfig) -> int:
    """Return the actions of a layout, before it is built."""
    return 3 * decisions.stage_count * decisions.unit_count


def relabel_fitted(one: EvaluatedPlan) -> EvaluatedPlan:
    """Return a family's plan named `fit`: the upper bound of the step with `--fix schedule=fit`."""
    named = replace(one.simulation.timeline.schedule, name=FIT)
    return replace(
        one,
        decisions=replace(one.decisions, schedule=FIT),
        simulation=replace(one.simulation, timeline=simulate_schedule(named, one.simulation.costs)),
    )
