"""The placement search inside the planner: for the best candidates of a search, on clusters with different links."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipefit.cost.pipeline.table import cost_table
from pipefit.errors import PlanError
from pipefit.plan.assemble.pipeline_work import pipeline_work
from pipefit.plan.evaluate.evaluate import simulate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.port_contention import without_contention
from pipefit.plan.placement.links import links_differ
from pipefit.plan.placement.lowered import LoweredPlacement, place_lowered
from pipefit.plan.placement.search import PlacementBudget, PlacementResult, search_placement
from pipefit.plan.placement.shape import build_problem
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import check_config
from pipefit.plan.types import Job
from pipefit.schedule.actions import Schedule
from pipefit.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacingBudget:
    """Budgets of device placement."""

    candidates: int = 4
    "Candidates to place: the fastest of each grid of replicas and lanes, the fastest grids first."
    first_moves: int = 8_000
    "Maximum number of moves for each of these candidates."
    final_moves: int = 40_000
    "Maximum number of moves for the best of them again."
    compiled_moves: int = 8_000
    "Total moves from which numba is loaded: an interpreted move takes a quarter of a millisecond."


PLACING_BUDGET = PlacingBudget()


@dataclass(frozen=True, slots=True)
class PlacingResult:
    """Result of placing the candidates of a search."""

    found: SearchResult
    note: str
    "Text for the plan; '' if nothing was searched."


def place_candidates(context: PlannerContext, job: Job, constraints: Constraints, found: SearchResult) -> PlacingResult:
    """Return the search result with the devices of its best candidates placed.

    Nothing changes if all links and devices are alike, or if hostname order is constrained. Deterministic: the budget
    counts moves.
    """
    mapping = constraints.mapping or "search"
    if isinstance(mapping, tuple) and found.fitting:
        return _as_given(context, job, mapping, found)
    if not found.fitting or mapping == "hostname" or not links_differ(context.cluster):
        return PlacingResult(found, "")
    listed = _short_list(found, context.context_parts)
    if not listed:
        return PlacingResult(found, "")
    slots = [found.fitting[index].decisions.device_count for index in listed]
    budget = PLACING_BUDGET
    total = sum(moves_for(count, budget.first_moves) for count in slots) + moves_for(max(slots), budget.final_moves)
    compiled = total >= budget.compiled_moves or None
    placed: dict[int, EvaluatedPlan] = {}
    for done, index in enumerate(listed):
        context.tracker.count_left(len(listed) - done)
        placed[index] = _place_candidate(context, job, found.fitting[index], compiled)
    first = min(placed, key=lambda index: placed[index].rank_key)
    again = _place_longer(context, job, placed[first], compiled)
    placed[first] = min((placed[first], again), key=lambda plan: plan.rank_key)
    fitting = [placed.get(index, plan) for index, plan in enumerate(found.fitting)]
    fitting.sort(key=lambda plan: plan.rank_key)
    best = fitting[0]
    before = found.fitting[0]
    chosen = next((index for index, plan in placed.items() if plan is best), None)
    unplaced = before if chosen is None else found.fitting[chosen]
    return PlacingResult(replace(found, fitting=tuple(fitting)), _placement_note(best, unplaced, before, len(listed)))


def _as_given(context: PlannerContext, job: Job, devices: tuple[int, ...], found: SearchResult) -> PlacingResult:
    """Return the candidates that use this number of devices, on these devices."""
    alike = [plan for plan in found.fitting if plan.decisions.device_count == len(devices)]
    if not alike:
        raise PlanError(
            "No plan that fits uses this number of devices.",
            where="--fix mapping",
            seen=f"{len(devices)} devices",
            allowed=", ".join(map(str, sorted({plan.decisions.device_count for plan in found.fitting}))),
            next_step="give a device for every (lane, replica, shard), shards fastest; fix stages and replicas too",
        )
    for plan in alike:
        check_config(
            replace(plan.decisions, devices=devices), job, len(context.only_module.layers), context.network.devices
        )
    fitting = [moved for plan in alike if (moved := _move_to(context, job, plan, devices)).simulation.fits_in_memory]
    if not fitting:
        raise PlanError(
            "No plan fits on these devices in this order.",
            where="--fix mapping",
            seen=", ".join(map(str, devices[:8])) + (", ..." if len(devices) > 8 else ""),
            next_step="assign the devices with less memory to other lanes, or leave the mapping to the search",
        )
    fitting.sort(key=lambda plan: plan.rank_key)
    return PlacingResult(replace(found, fitting=tuple(fitting)), "placement: as given")


def _short_list(found: SearchResult, context_parts: int) -> list[int]:
    """Return the indices of the candidates to place: those whose sequences are in this number of parts.

    Groups that shard state together keep their devices: the placement search knows rings of all replicas only.
    """
    grids: dict[tuple[int, int], int] = {}
    for index, plan in enumerate(found.fitting):
        decisions = plan.decisions
        if decisions.device_count > 1 and decisions.context == context_parts and not decisions.hybrid_group:
            grids.setdefault((len(plan.decisions.replicas), plan.decisions.lane_count), index)
    return list(grids.values())[: PLACING_BUDGET.candidates]


def moves_for(slots: int, most: int) -> int:
    """Return the moves for a plan with this number of slots: a few for each pair of them, up to `most`."""
    return min(25 * slots * slots, most)


def _place_candidate(context: PlannerContext, job: Job, one: EvaluatedPlan, compiled: bool | None) -> EvaluatedPlan:
    """Return the candidate on the best devices found; itself if none are better or the better ones do not fit."""
    start, moves = _lower_candidate(context, one), moves_for(one.decisions.device_count, PLACING_BUDGET.first_moves)
    return _if_better(
        context,
        job,
        one,
        search_placement(start.question, start.timeline, PlacementBudget(moves=moves), compiled=compiled),
    )


def _place_longer(context: PlannerContext, job: Job, one: EvaluatedPlan, compiled: bool | None) -> EvaluatedPlan:
    """Return the candidate after a longer search, which continues with the order of each placement it finds."""
    budget = PlacementBudget(moves=moves_for(one.decisions.device_count, PLACING_BUDGET.final_moves), seed=1)
    placement = place_lowered(
        _lower_candidate(context, one),
        lambda devices: _lower_candidate(context, _move_to(context, job, one, devices)),
        budget,
        compiled=compiled,
    )
    return _if_better(context, job, one, placement)


def _lower_candidate(context: PlannerContext, one: EvaluatedPlan) -> LoweredPlacement:
    """Return the start of a placement search. A plan that does not fit has an infinite step time."""
    timeline = without_contention(one).simulation.timeline
    question = build_problem(one.simulation.work, context.network, context.layers, timeline)
    return LoweredPlacement(
        question=question, timeline=timeline, step_s=one.step_s if one.simulation.fits_in_memory else math.inf
    )


def _if_better(context: PlannerContext, job: Job, one: EvaluatedPlan, found: PlacementResult) -> EvaluatedPlan:
    """Return the candidate on the devices found, or itself."""
    if found.step_s >= found.given_s:
        return one
    better = _move_to(context, job, one, found.devices)
    return better if better.simulation.fits_in_memory and better.rank_key < one.rank_key else one


def _move_to(context: PlannerContext, job: Job, one: EvaluatedPlan, devices: tuple[int, ...]) -> EvaluatedPlan:
    """Return the candidate on other devices: the same order of its actions, lowered and simulated under their times."""
    decisions = replace(one.decisions, devices=devices)
    parts = context.make_skeleton(job, decisions)
    work = pipeline_work(parts, context.programs)
    costs = cost_table(work, context.network, context.layers)
    return simulate_candidate(context, decisions, parts, work, costs, _compute_order(one.simulation.timeline.schedule))


def _compute_order(lowered: Schedule) -> Schedule:
    """Return the compute actions of a lowered schedule, in their order."""
    kinds = ("F", "I", "W", "B")
    lanes = tuple(tuple(action for action in lane if action.kind in kinds) for lane in lowered.lanes)
    return replace(lowered, lanes=lanes)


def _placement_note(best: EvaluatedPlan, own: EvaluatedPlan, before: EvaluatedPlan, listed: int) -> str:
    """Return the gain of the placement, as a note for the plan."""
    tried = f"devices placed for {listed} candidate{'s' if listed > 1 else ''}"
    order = "with devices grouped by kind" if own.decisions.devices else "in hostname order"
    if best.decisions.devices == own.decisions.devices:
        return f"placement: {order.removeprefix('in ')}; {tried}, none of them faster"
    gain = 1 - best.step_s / own.step_s
    text = f"placement: searched; {gain:.1%} less than this plan {order} ({format_seconds(own.step_s)})"
    if before is not own:
        text += f", {1 - best.step_s / before.step_s:.1%} less than the best plan before devices were placed"
    return f"{text}; {tried}"
