"""Memory against time on one layout: the schedule families with each kind of recomputation, and fitted orders.

Orders are fitted to several limits, from the lowest feasible memory to the highest useful one. The fastest point that
fits is the plan. A single lane has one order, so only recomputation differs there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipefit.cost.memory.order_limits import order_limits
from pipefit.errors import ScheduleError
from pipefit.model.analysis.saved import Recompute
from pipefit.plan.assemble.structure import FormsError
from pipefit.plan.candidates.space import RECOMPUTE_CHOICES
from pipefit.plan.cutting.rows import scale_need
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.simplicity import choose_simplest
from pipefit.plan.passes.fitted_orders import FITTING_BUDGET, fit_layout, recompute_choices, tables_of
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, TradePoint
from pipefit.schedule.families import DEFAULT_FAMILY, FAMILIES
from pipefit.schedule.fit.family import FIT


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeBudget:
    """Budgets of the trade of memory against time."""

    lower_limits: int = 2
    """Limits below the device's to fit orders to. Layouts with many actions are fitted on request only, to the
    device's limit."""
    higher_limits: int = 2
    "Limits beyond the device's to fit orders to."
    family_actions: int = 2_000_000
    "Actions of a layout times its devices above which the curve has no other families."
    step_tolerance: float = 1e-9
    "Relative difference below which step times count as equal."
    traded_layouts: int = 2
    "Layouts to trade on at most: a faster point of the first one may leave another plan the simplest."


TRADE_BUDGET = TradeBudget()


@dataclass(frozen=True, slots=True)
class TradeCurve:
    """Memory against time on one layout."""

    best: EvaluatedPlan
    "The chosen point: the fastest that fits and obeys the constraints, or the simplest within a tolerance."
    fastest: EvaluatedPlan
    "The fastest point that fits and obeys the constraints."
    points: tuple[TradePoint, ...] = ()
    "Sorted by memory."

    def lead_result(self, result: SearchResult) -> SearchResult:
        """Return the search result with the chosen point of the curve as its first plan, then the next fastest."""
        listed = {id(plan): plan for plan in (self.best, self.fastest, *result.fitting)}
        best, *runners_up = listed.values()
        if any(plan.step_s < best.step_s for plan in runners_up):
            runners_up.sort(key=lambda plan: plan.rank_key)
        return replace(result, fitting=(best, *runners_up))


def trade_memory(
    context: PlannerContext,
    job: Job,
    constraints: Constraints,
    best: EvaluatedPlan,
    tolerance: float = 0.0,
    fastest_s: float = float("inf"),
) -> TradeCurve:
    """Return the points of the chosen plan's layout (its replicas, lanes, microbatches, sharded state, device order),
    and the plan.

    Any point that fits, obeys the constraints and is faster than `best` replaces it, so no such point is faster than
    the plan. With a tolerance, the simplest point within it replaces the fastest; `fastest_s` is then the fastest step
    of other layouts. Fitted orders are points only if they are faster than every fitted order with less memory.
    """
    layout = best.decisions
    actions = 3 * layout.stage_count * layout.unit_count
    is_large = actions * layout.device_count > TRADE_BUDGET.family_actions
    has_many_actions = is_large or actions > FITTING_BUDGET.layout_actions
    family_plans: list[EvaluatedPlan] = []
    if not is_large:
        family_plans = list(_evaluate_families(context, job, constraints, layout, has_many_actions))
    fitted = [best] if layout.schedule == FIT else []
    if layout.lane_count > 1 and (not has_many_actions or constraints.schedule == FIT):
        levels = _limit_levels(best, family_plans, has_many_actions)
        fitted = _fit_levels(context, job, constraints, layout, levels, fitted, _lane_limits(best))
    choices = [best]
    fastest = best
    for plan in (*family_plans, *fitted):
        if plan.simulation.fits_in_memory and _obeys_constraints(plan.decisions, constraints):
            choices.append(plan)
            if plan.step_s < fastest.step_s * (1 - TRADE_BUDGET.step_tolerance):
                fastest = plan
    best = choose_simplest(choices, tolerance, fastest_s) if tolerance else fastest
    points = {_trade_point(plan) for plan in (*family_plans, *fitted)} - {_trade_point(best)}
    ordered = sorted(
        (*points, replace(_trade_point(best), chosen=True)),
        key=lambda plan: (plan.memory_bytes, plan.step_s, plan.schedule, plan.recompute),
    )
    return TradeCurve(best, fastest, tuple(ordered))


def _limit_levels(best: EvaluatedPlan, found: Sequence[EvaluatedPlan], many: bool) -> list[float]:
    """Return the fractions of the limits to fit orders to, rising; without 1 if `best` is already fitted to the full
    limit."""
    full_level = [] if best.decisions.schedule == FIT else [1.0]
    if many:
        return full_level
    fills = [plan.peak_bytes / plan.limit_bytes for plan in (best, *found)]
    highest, lowest = min(1.5, max([1.0, *fills])), min(fills)
    lower, higher = TRADE_BUDGET.lower_limits, TRADE_BUDGET.higher_limits
    below = [lowest + (1.0 - lowest) * index / lower for index in range(lower)] if lowest < 1.0 else []
    beyond = [1.0 + (highest - 1.0) * (index + 1) / higher for index in range(higher)] if highest > 1.0 else []
    return [*below, *full_level, *beyond]


def _lane_limits(one: EvaluatedPlan) -> tuple[float, ...]:
    """Return the bytes available to orders on every lane."""
    simulation = one.simulation
    return order_limits(simulation.costs, simulation.timeline.schedule.placement, simulation.least_bytes)


def _obeys_constraints(decisions: ParallelConfig, constraints: Constraints) -> bool:
    """Return whether a point of a layout that obeys the constraints also obeys those on the choices in which points
    differ."""
    same_schedule = constraints.schedule in (None, decisions.schedule)
    return same_schedule and constraints.stages in (None, decisions.stage_count)


def _evaluate_families(
    context: PlannerContext, job: Job, constraints: Constraints, layout: ParallelConfig, many: bool
) -> Iterator[EvaluatedPlan]:
    """Yield every family and kind of recomputation on these lanes, whether it fits or not."""
    recomputes: Sequence[tuple[Recompute, ...]] = (
        [constraints.recompute] if constraints.recompute is not None else RECOMPUTE_CHOICES
    )
    if many and layout.recompute in recomputes:
        recomputes = [layout.recompute]
    for name, placement in _traded_families(constraints, layout, len(context.only_module.layers)):
        for recompute in recomputes:
            if len(recompute) not in (1, len(placement)):
                continue
            decisions = replace(
                layout,
                schedule=name,
                stages=len(placement),
                placement=() if placement == tuple(range(layout.lane_count)) else placement,
                cuts=constraints.cuts or (),
                recompute=recompute,
            )
            try:
                yield evaluate_candidate(context, decisions, context.make_skeleton(job, decisions))
            except (ScheduleError, FormsError):  # some forms of the hidden state cannot be sent back between groups
                continue


def _traded_families(
    constraints: Constraints, layout: ParallelConfig, layers: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the families that can run on the lanes of a layout, with their stage placements."""
    shown = sorted(name for name, family in FAMILIES.items() if family.shown_in_trade)
    for name in shown if layout.lane_count > 1 else [_single_lane_family(layout)]:
        placement = FAMILIES[name].placement(layout.lane_count)
        if len(placement) > layers or layout.unit_count < FAMILIES[name].least_units(layout.lane_count):
            continue
        if constraints.placement is not None and placement != layout.lane_of_stage:
            continue
        if constraints.cuts is None or len(placement) == len(constraints.cuts) + 1:
            yield name, placement


def _single_lane_family(layout: ParallelConfig) -> str:
    """Return the family that represents all on a single lane."""
    return DEFAULT_FAMILY if layout.schedule == FIT else layout.schedule


def _fit_levels(
    context: PlannerContext,
    job: Job,
    constraints: Constraints,
    layout: ParallelConfig,
    levels: Sequence[float],
    known: Sequence[EvaluatedPlan],
    limits: Sequence[float],
) -> list[EvaluatedPlan]:
    """Return orders fitted to each of these fractions of the lanes' limits, rising; `known` are already fitted."""
    recomputes = recompute_choices(
        constraints, replace(layout, recompute=layout.recompute if len(layout.recompute) == 1 else ("none",))
    )
    actions = 3 * layout.stage_count * layout.unit_count
    if len(layout.recompute) == 1 and actions > FITTING_BUDGET.stage_recompute_actions:
        recomputes = [layout.recompute]
    tables = tables_of(context, job, layout, recomputes)
    plans = list(known)
    for index, level in enumerate(levels):
        context.tracker.count_left(len(levels) - index)
        plan = fit_layout(context, tables, [level * limit for limit in limits], moves=FITTING_BUDGET.least_moves)
        if plan is not None:
            plans.append(plan)
    frontier: list[EvaluatedPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes / plan.limit_bytes, plan.step_s)):
        if not frontier or plan.step_s < frontier[-1].step_s * (1 - 1e-6):
            frontier.append(plan)
    return frontier


def _trade_point(one: EvaluatedPlan) -> TradePoint:
    decisions = one.decisions
    return TradePoint(
        schedule=decisions.schedule,
        recompute=",".join(decisions.recompute),
        memory_bytes=scale_need(one.peak_bytes, one.limit_bytes, min(one.simulation.least_bytes)),
        step_s=one.step_s,
        fits=one.simulation.fits_in_memory,
    )
