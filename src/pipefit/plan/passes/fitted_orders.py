"""Memory as a continuous trade: for the most promising layouts, the best order that fits in the memory that is left.

The search compares schedule families, each of which needs the memory that it needs. Here a short list of its layouts
(replicas, lanes, microbatches, ZeRO-1, device order, cuts) gets an order made for it (`pipefit.schedule.fit`), under
its own cost tables and within what every lane's devices have; every stage chooses whether and what it recomputes. The
simulator decides, on the lowered lanes, as it does about families. Everything is counted in moves, not in seconds,
so the plan is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from pipefit.cost.memory.lanes import lane_limits
from pipefit.cost.memory.order_limits import order_limits
from pipefit.cost.pipeline.table import cost_table
from pipefit.cost.types import CostTable
from pipefit.cost.work import PipelineWork
from pipefit.errors import ScheduleError
from pipefit.plan.assemble.order import order_problem
from pipefit.plan.assemble.pipeline_work import PlanSkeleton, pipeline_work
from pipefit.plan.bounds.step_bounds import table_bound_s
from pipefit.plan.candidates.space import RECOMPUTE
from pipefit.plan.evaluate.evaluate import evaluate_candidate, simulate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.reslice import reslice_best
from pipefit.plan.passes.search import TIE, Progress, search_plans
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Recompute
from pipefit.simulate import simulate_schedule

FIT = "fit"

HOPE = 0.1
"""How much a layout's family may lie behind the best one, as a part of it, for its layout to get a fitted order."""

REFINED = 3
"""Placements whose best plan is cut again where `fit_schedule` is pinned."""

POOL = 10
"""Layouts whose bounds are worked out."""

LAYOUTS, ACTIONS = 4, 5_000
"""Layouts that get fitted orders: at most so many, fewer where they have many actions together."""

MANY = 3_000
"""Actions of a layout above which an order is fitted only where `fit_schedule` is pinned: with so many, the moves that
planning has time for gain next to nothing."""

CHOOSING = 1_000
"""Actions of a layout above which its stages do not choose whether they recompute: all keep to the layout's own way."""

MOVES, WORK = (2_000, 20_000), 15_000_000
"""Moves of one fit: WORK over the actions, within these limits. The time of a move grows with the actions."""

LOOK, NEAR = 10, 0.01
"""Every layout of the short list gets a tenth of the moves first; the rest only those within 1 % of the best."""

TIGHTER = 4
"""How often an order is fitted again because lowering took memory that it did not count."""


def best_plans(
    bench: PlannerContext,
    job: Job,
    pins: Mapping[str, Any],
    top: int = 5,
    progress: Progress | None = None,
    layouts: int = LAYOUTS,
) -> SearchResult:
    """What the search finds, and the fitted orders that beat it. With `schedule=fit` pinned, fitted orders alone."""
    first = search_plans(bench, job, pins, top, progress)
    found = reslice_best(bench, job, pins, _recut_best(bench, job, pins, first, min(layouts, REFINED)))
    pinned = pins.get("schedule") == FIT
    if pins.get("schedule", FIT) != FIT:
        return found
    fitted: list[EvaluatedPlan] = []
    before = [one.decisions for one in first.fitting[:1] if one not in found.fitting]
    listed = _short_list(bench, job, pins, found, layouts, before)
    for tables, look in _promising_choices(bench, listed):
        best_s = min((one.step_s for one in (*found.fitting[:1], *fitted)), default=float("inf"))
        made = (look, fit_layout(bench, tables))
        one = min((one for one in made if one is not None), key=lambda one: one.rank_key, default=None)
        if one is not None and (pinned or one.step_s < best_s * (1 - TIE)):
            fitted.append(one)
    others = [_relabel_fitted(one) for one in found.fitting] if pinned else found.fitting
    fitting = _distinct_plans(sorted((*others, *fitted), key=lambda one: one.rank_key))
    return replace(found, fitting=tuple(fitting), fitted=len(fitted))


def _promising_choices(
    bench: PlannerContext, listed: Sequence[Listed]
) -> Sequence[tuple[list[FittingChoice], EvaluatedPlan | None]]:
    """Of a short list those that are worth all the moves: by what a few moves reach with the layout's own way of
    recomputing, the best one, and those that come within NEAR of it. Each with what the few moves came to, which with
    what transfers share is sometimes the better order: a fit asks the plain simulator."""
    if len(listed) < 2:
        return [(tables, None) for tables, _ in listed]
    looks: list[tuple[float, list[FittingChoice], EvaluatedPlan | None]] = []
    for tables, own in listed:
        best_s = min((step_s for step_s, _, _ in looks), default=float("inf"))
        if tables[0].bound_s < best_s:
            one = fit_layout(bench, [own], moves=moves_for(_action_count(own.parts)) // LOOK)
            looks.append((one.step_s if one is not None else float("inf"), tables, one))
    best_s = min(step_s for step_s, _, _ in looks)
    return [(tables, one) for step_s, tables, one in looks if step_s <= best_s * (1 + NEAR)]


def _recut_best(
    bench: PlannerContext, job: Job, pins: Mapping[str, Any], found: SearchResult, most: int
) -> SearchResult:
    """What was found, the best plan with better cuts where its lanes hold several stages and some are better. Where
    `fit_schedule` is pinned, the best plan of `most` placements: the orders are made for these cuts."""
    if "cuts" in pins:
        return found
    seen: set[tuple[int, ...]] = set()
    fitting = list(found.fitting)
    for index, one in enumerate(found.fitting):
        if (placement := one.decisions.lane_of_stage) in seen or len(seen) >= most:
            continue
        seen.add(placement)
        fitting[index] = _refine_cuts(bench, job, one)
        if pins.get("schedule") != FIT:
            break
    return replace(found, fitting=tuple(sorted(fitting, key=lambda one: one.rank_key)))


def _refine_cuts(bench: PlannerContext, job: Job, one: EvaluatedPlan) -> EvaluatedPlan:
    """The plan with the better cuts, or itself where there are none."""
    free = replace(one.decisions, stages=one.decisions.stage_count, cuts=())
    parts = bench.refine_skeleton(job, free, one.parts)
    if parts is one.parts:
        return one
    again = evaluate_candidate(bench, one.decisions, parts)
    return again if again.simulation.fits_in_memory and again.step_s < one.step_s else one


def _distinct_plans(ranked: Sequence[EvaluatedPlan]) -> list[EvaluatedPlan]:
    """The first of every choice: orders that differ in nothing but their time, or their cuts, are one choice."""
    kept = {replace(one.decisions, stages=one.decisions.stage_count, cuts=()): one for one in reversed(ranked)}
    return sorted(kept.values(), key=lambda one: one.rank_key)


def recompute_choices(pins: Mapping[str, Any], layout: ParallelConfig) -> list[tuple[Recompute, ...]]:
    """The ways of recomputing that a layout may choose from; one that varies by stage is kept."""
    if "recompute" in pins:
        return [pins["recompute"]]
    return [layout.recompute, *(one for one in RECOMPUTE if one != layout.recompute)]


@dataclass(frozen=True, slots=True)
class FittingChoice:
    """A layout with one way of recomputing, ready to be fitted."""

    bound_s: float
    "No order of it takes less, whatever the memory."
    decisions: ParallelConfig
    parts: PlanSkeleton
    work: PipelineWork
    costs: CostTable


Listed = tuple[list[FittingChoice], FittingChoice]
"""The choices of a layout, and among them its own way of recomputing."""


def tables_of(
    bench: PlannerContext, job: Job, layout: ParallelConfig, recomputes: Sequence[tuple[Recompute, ...]]
) -> list[FittingChoice]:
    """The choices of a layout with cuts, the one with the least bound first."""
    found = []
    for recompute in recomputes:
        decisions = replace(layout, schedule=FIT, recompute=recompute)
        parts = bench.make_skeleton(job, decisions)
        work = pipeline_work(parts, bench.programs)
        costs = cost_table(work, bench.network, bench.layers)
        found.append(
            FittingChoice(table_bound_s(costs, parts.placement, parts.microbatches, FIT), decisions, parts, work, costs)
        )
    return sorted(found, key=lambda one: one.bound_s)


def fit_layout(
    bench: PlannerContext,
    tables: Sequence[FittingChoice],
    limits: Sequence[float] | None = None,
    moves: int | None = None,
) -> EvaluatedPlan | None:
    """The best order found for a layout, every stage recomputing by one of the choices, or where that finds none all by
    the same; lowered and simulated. None where no order fits. `limits` of every lane, default those of its devices."""
    if limits is None:
        least = lane_limits(tables[0].work, bench.network)
        limits = order_limits(tables[0].costs, tables[0].parts.placement, least)
    count = moves_for(_action_count(tables[0].parts)) if moves is None else moves
    one = _fit_order(bench, tables, limits, count)
    if one is None and len(tables) > 1:
        alone = [found for table in tables if (found := _fit_order(bench, [table], limits, count)) is not None]
        one = min(alone, key=lambda found: found.rank_key, default=None)
    return one


def _fit_order(
    bench: PlannerContext, tables: Sequence[FittingChoice], limits: Sequence[float], moves: int
) -> EvaluatedPlan | None:
    """One order for all these ways of recomputing, fitted again with less where its transfers need memory."""
    from pipefit.schedule.fit.search import fit_schedule

    room = list(limits)
    by_name: dict[str, CostTable] = {one.decisions.recompute[0]: one.costs for one in tables}
    options = by_name if len(tables) > 1 else None
    for _ in range(TIGHTER):
        try:
            made = fit_schedule(order_problem(tables[0].parts, tables[0].costs, room), moves=moves, options=options)
        except ScheduleError:
            return None
        choice = _choose_recompute(bench, tables, made.recompute)
        one = simulate_candidate(bench, choice.decisions, choice.parts, choice.work, choice.costs, made.schedule)
        over = [float(peak) - limit for peak, limit in zip(one.simulation.timeline.peak_bytes, limits, strict=True)]
        if max(over) <= 0:
            return one
        room = [limit - max(0.0, more) for limit, more in zip(room, over, strict=True)]
    return None


def _choose_recompute(
    bench: PlannerContext, tables: Sequence[FittingChoice], recompute: Sequence[str]
) -> FittingChoice:
    """The layout with what every stage took."""
    if len(tables) == 1:
        return tables[0]
    for one in tables:
        if {*recompute} == {*one.decisions.recompute}:
            return one
    taken = cast(tuple[Recompute, ...], tuple(recompute))
    return tables_of(bench, tables[0].parts.job, tables[0].decisions, [taken])[0]


def moves_for(actions: int) -> int:
    """Moves of a fit of so many actions."""
    return max(MOVES[0], min(MOVES[1], WORK // max(actions, 1)))


def _short_list(
    bench: PlannerContext,
    job: Job,
    pins: Mapping[str, Any],
    found: SearchResult,
    most: int,
    before: Sequence[ParallelConfig],
) -> list[Listed]:
    """Layouts whose bound leaves something to win: the best one, also `before` it was cut again (even stages are worth
    more to an order of its own than to the family's); then the most promising of those of the next families and of
    plans that would be faster but lack memory, put back by what they lack."""
    best_s = found.fitting[0].step_s if found.fitting else float("inf")
    scored = [(one.step_s, 1.0, one.decisions) for one in found.fitting if one.step_s <= best_s * (1 + HOPE)]
    sure = [*(one.decisions for one in found.fitting[:1]), *before]
    scored += [(best_s, 1.0, decisions) for decisions in before]
    for misfit in found.misfits:
        if misfit.bound_s < best_s:
            scored.append((misfit.bound_s, max(1.0, misfit.peak_bytes / misfit.limit_bytes), misfit.decisions))
    ready: list[tuple[float, int, Listed]] = []
    seen: set[ParallelConfig] = set()
    for step_s, lack, decisions in sorted(scored, key=lambda one: (one[1] > 1, one[0] * one[1])):
        key = replace(decisions, schedule=FIT, recompute=("none",), stages=decisions.stage_count, cuts=())
        key = replace(key, cuts=decisions.cuts) if decisions in before else key
        if key in seen or len(seen) >= POOL or (decisions.lane_count == 1 and pins.get("schedule") != FIT):
            continue
        seen.add(key)
        if _least_actions(decisions) > MANY and pins.get("schedule") != FIT:
            continue
        tables = tables_of(bench, job, decisions, recompute_choices(pins, decisions))
        own = next(one for one in tables if one.decisions.recompute == decisions.recompute)
        score = max(step_s, own.bound_s) * lack
        if _action_count(own.parts) > CHOOSING:
            tables = [own]
        if tables[0].bound_s < best_s and score <= best_s * (1 + HOPE):
            ready.append((0.0 if decisions in sure else score, len(ready), (tables, own)))
    result: list[Listed] = []
    actions = 0
    for _, _, one in sorted(ready, key=lambda one: one[:2]):
        result.append(one)
        actions += _action_count(one[1].parts)
        if len(result) >= most or actions >= ACTIONS:
            break
    return result


def _action_count(parts: PlanSkeleton) -> int:
    return 3 * len(parts.stages) * parts.microbatches * len(parts.slices)


def _least_actions(decisions: ParallelConfig) -> int:
    """The actions of a layout, before it is built."""
    return 3 * decisions.stage_count * decisions.unit_count


def _relabel_fitted(one: EvaluatedPlan) -> EvaluatedPlan:
    """A family's plan as the fitted one: what `--fix schedule=fit` must not be slower than."""
    named = replace(one.simulation.timeline.schedule, name=FIT)
    return replace(
        one,
        decisions=replace(one.decisions, schedule=FIT),
        simulation=replace(one.simulation, timeline=simulate_schedule(named, one.simulation.costs)),
    )
