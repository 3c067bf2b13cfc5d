"""Memory against time on one layout: what each schedule family and each way of recomputing needs and takes, and the
orders fitted to limits between the least that works and the most that helps. The fastest point that fits is the plan.
A single lane has one order, so there only recomputing differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipefit.cost.memory.order_limits import order_limits
from pipefit.errors import ScheduleError
from pipefit.plan.assemble.structure import FormsError
from pipefit.plan.candidates.space import RECOMPUTE
from pipefit.plan.cutting.rows import scale_need
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.fitted_orders import CHOOSING, FIT, MANY, MOVES, fit_layout, recompute_choices, tables_of
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Recompute, TradePoint
from pipefit.schedule.families import FAMILIES

BELOW, BEYOND = 2, 2
"""Limits that orders are fitted to: so many below the device's, and so many beyond it. Where a fit has many actions,
the device's alone."""

SAME = 1e-9
"""Relative difference of step times that counts as none."""


@dataclass(frozen=True, slots=True)
class TradeCurve:
    """Memory against time on one layout."""

    best: EvaluatedPlan
    "The fastest of all points that fit and obey the pins."
    points: tuple[TradePoint, ...] = ()
    "By memory."


def trade_memory(bench: PlannerContext, job: Job, pins: Mapping[str, Any], best: EvaluatedPlan) -> TradeCurve:
    """The points of the chosen plan's layout (its replicas, lanes, microbatches, ZeRO-1, device order), and the plan.

    Whatever point fits, obeys the pins and is faster than `best` is taken in its place, so no such point is faster than
    the plan. Of fitted orders only those are points that are faster than every fitted one with less memory.
    """
    layout = best.decisions
    many = 3 * layout.stage_count * layout.unit_count > MANY
    found = list(_evaluate_families(bench, job, pins, layout, many))
    own = best if layout.schedule == FIT else None
    fitted: list[EvaluatedPlan] = []
    if layout.lane_count > 1:
        fitted = _fit_levels(bench, job, pins, layout, _limit_levels(best, found, many), own, _lane_limits(best))
    for one in (*found, *fitted):
        if (
            one.simulation.fits_in_memory
            and one.step_s < best.step_s * (1 - SAME)
            and _obeys_constraints(one.decisions, pins)
        ):
            best = one
    points = {_trade_point(one) for one in (*found, *fitted)} - {_trade_point(best)}
    ordered = sorted(
        (*points, replace(_trade_point(best), chosen=True)),
        key=lambda one: (one.memory_bytes, one.step_s, one.schedule, one.recompute),
    )
    return TradeCurve(best, tuple(ordered))


def _limit_levels(best: EvaluatedPlan, found: Sequence[EvaluatedPlan], many: bool) -> list[float]:
    """Parts of the limits to fit orders to, rising; not 1, the whole, where `best` is fitted to it already."""
    own = [] if best.decisions.schedule == FIT else [1.0]
    if many:
        return own
    fills = [one.peak_bytes / one.limit_bytes for one in (best, *found)]
    highest, lowest = min(1.5, max([1.0, *fills])), min(fills)
    below = [lowest + (1.0 - lowest) * index / BELOW for index in range(BELOW)] if lowest < 1.0 else []
    beyond = [1.0 + (highest - 1.0) * (index + 1) / BEYOND for index in range(BEYOND)] if highest > 1.0 else []
    return [*below, *own, *beyond]


def _lane_limits(one: EvaluatedPlan) -> tuple[float, ...]:
    """Of every lane, what orders may hold there."""
    simulation = one.simulation
    return order_limits(simulation.costs, simulation.timeline.schedule.placement, simulation.least_bytes)


def _obeys_constraints(decisions: ParallelConfig, pins: Mapping[str, Any]) -> bool:
    """Whether a point of a layout that obeys the pins obeys those that points differ in."""
    differ = {"schedule": decisions.schedule, "stages": decisions.stage_count}
    return all(pins.get(key, value) == value for key, value in differ.items())


def _evaluate_families(
    bench: PlannerContext, job: Job, pins: Mapping[str, Any], layout: ParallelConfig, many: bool
) -> Iterator[EvaluatedPlan]:
    """Every family and way of recomputing on these lanes, whether it fits or not."""
    layers = len(bench.only_module.layers)
    ways: Sequence[tuple[Recompute, ...]] = [pins["recompute"]] if "recompute" in pins else RECOMPUTE
    if many and layout.recompute in ways:
        ways = [layout.recompute]
    for name in sorted({*FAMILIES} - {FIT, "gpipe"}) if layout.lane_count > 1 else [_single_lane_family(layout)]:
        placement = FAMILIES[name].placement(layout.lane_count)
        if len(placement) > layers or layout.unit_count < FAMILIES[name].least_units(layout.lane_count):
            continue
        if "placement" in pins and placement != layout.lane_of_stage:
            continue
        if "cuts" in pins and len(placement) != len(pins["cuts"]) + 1:
            continue
        for recompute in ways:
            if len(recompute) not in (1, len(placement)):
                continue
            decisions = replace(
                layout,
                schedule=name,
                stages=len(placement),
                placement=() if placement == tuple(range(layout.lane_count)) else placement,
                cuts=pins.get("cuts", ()),
                recompute=recompute,
            )
            try:
                yield evaluate_candidate(bench, decisions, bench.make_skeleton(job, decisions))
            except (ScheduleError, FormsError):  # lanes of groups pass on what they hold one way, not always back
                continue


def _single_lane_family(layout: ParallelConfig) -> str:
    """The family that stands for all on a single lane."""
    return "1f1b" if layout.schedule == FIT else layout.schedule


def _fit_levels(
    bench: PlannerContext,
    job: Job,
    pins: Mapping[str, Any],
    layout: ParallelConfig,
    levels: Sequence[float],
    own: EvaluatedPlan | None,
    limits: Sequence[float],
) -> list[EvaluatedPlan]:
    """Orders fitted to each of these parts of the lanes' limits, rising; `own` is known already."""
    ways = recompute_choices(
        pins, replace(layout, recompute=layout.recompute if len(layout.recompute) == 1 else ("none",))
    )
    if len(layout.recompute) == 1 and 3 * layout.stage_count * layout.unit_count > CHOOSING:
        ways = [layout.recompute]
    tables = tables_of(bench, job, layout, ways)
    found = [] if own is None else [own]
    for level in levels:
        one = fit_layout(bench, tables, [level * limit for limit in limits], moves=MOVES[0])
        if one is not None:
            found.append(one)
    kept: list[EvaluatedPlan] = []
    for one in sorted(found, key=lambda one: (one.peak_bytes / one.limit_bytes, one.step_s)):
        if not kept or one.step_s < kept[-1].step_s * (1 - 1e-6):
            kept.append(one)
    return kept


def _trade_point(one: EvaluatedPlan) -> TradePoint:
    decisions = one.decisions
    return TradePoint(
        schedule=decisions.schedule,
        recompute=",".join(decisions.recompute),
        memory_bytes=scale_need(one.peak_bytes, one.limit_bytes, min(one.simulation.least_bytes)),
        step_s=one.step_s,
        fits=one.simulation.fits_in_memory,
    )
