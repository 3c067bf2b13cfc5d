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
from pipefit.plan.cutting.rows import scaled
from pipefit.plan.evaluate.evaluate import evaluate
from pipefit.plan.evaluate.outcome import Evaluated
from pipefit.plan.evaluate.planner_context import Workbench
from pipefit.plan.passes.fitted_orders import CHOOSING, FIT, MANY, MOVES, choices, fit_layout, tables_of
from pipefit.plan.request.decisions import Decisions
from pipefit.plan.types import Job, Recompute, TradePoint
from pipefit.schedule.families import FAMILIES

BELOW, BEYOND = 2, 2
"""Limits that orders are fitted to: so many below the device's, and so many beyond it. Where a fit has many actions,
the device's alone."""

SAME = 1e-9
"""Relative difference of step times that counts as none."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Memory against time on one layout."""

    best: Evaluated
    "The fastest of all points that fit and obey the pins."
    points: tuple[TradePoint, ...] = ()
    "By memory."


def trade(bench: Workbench, job: Job, pins: Mapping[str, Any], best: Evaluated) -> Curve:
    """The points of the chosen plan's layout (its replicas, lanes, microbatches, ZeRO-1, device order), and the plan.

    Whatever point fits, obeys the pins and is faster than `best` is taken in its place, so no such point is faster than
    the plan. Of fitted orders only those are points that are faster than every fitted one with less memory.
    """
    layout = best.decisions
    many = 3 * layout.stage_count * layout.units > MANY
    found = list(_families(bench, job, pins, layout, many))
    own = best if layout.schedule == FIT else None
    fitted: list[Evaluated] = []
    if layout.lanes > 1:
        fitted = _fitted(bench, job, pins, layout, _levels(best, found, many), own, _limits(best))
    for one in (*found, *fitted):
        if one.simulation.fits and one.step_s < best.step_s * (1 - SAME) and _obeys(one.decisions, pins):
            best = one
    points = {_point(one) for one in (*found, *fitted)} - {_point(best)}
    ordered = sorted(
        (*points, replace(_point(best), chosen=True)),
        key=lambda one: (one.memory_bytes, one.step_s, one.schedule, one.recompute),
    )
    return Curve(best, tuple(ordered))


def _levels(best: Evaluated, found: Sequence[Evaluated], many: bool) -> list[float]:
    """Parts of the limits to fit orders to, rising; not 1, the whole, where `best` is fitted to it already."""
    own = [] if best.decisions.schedule == FIT else [1.0]
    if many:
        return own
    fills = [one.peak_bytes / one.limit_bytes for one in (best, *found)]
    highest, lowest = min(1.5, max([1.0, *fills])), min(fills)
    below = [lowest + (1.0 - lowest) * index / BELOW for index in range(BELOW)] if lowest < 1.0 else []
    beyond = [1.0 + (highest - 1.0) * (index + 1) / BEYOND for index in range(BEYOND)] if highest > 1.0 else []
    return [*below, *own, *beyond]


def _limits(one: Evaluated) -> tuple[float, ...]:
    """Of every lane, what orders may hold there."""
    simulation = one.simulation
    return order_limits(simulation.costs, simulation.timeline.schedule.placement, simulation.least_bytes)


def _obeys(decisions: Decisions, pins: Mapping[str, Any]) -> bool:
    """Whether a point of a layout that obeys the pins obeys those that points differ in."""
    differ = {"schedule": decisions.schedule, "stages": decisions.stage_count}
    return all(pins.get(key, value) == value for key, value in differ.items())


def _families(
    bench: Workbench, job: Job, pins: Mapping[str, Any], layout: Decisions, many: bool
) -> Iterator[Evaluated]:
    """Every family and way of recomputing on these lanes, whether it fits or not."""
    layers = len(bench.module.layers)
    ways: Sequence[tuple[Recompute, ...]] = [pins["recompute"]] if "recompute" in pins else RECOMPUTE
    if many and layout.recompute in ways:
        ways = [layout.recompute]
    for name in sorted({*FAMILIES} - {FIT, "gpipe"}) if layout.lanes > 1 else [_alone(layout)]:
        placement = FAMILIES[name].placement(layout.lanes)
        if len(placement) > layers or layout.units < FAMILIES[name].least_units(layout.lanes):
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
                placement=() if placement == tuple(range(layout.lanes)) else placement,
                cuts=pins.get("cuts", ()),
                recompute=recompute,
            )
            try:
                yield evaluate(bench, decisions, bench.parts(job, decisions))
            except (ScheduleError, FormsError):  # lanes of groups pass on what they hold one way, not always back
                continue


def _alone(layout: Decisions) -> str:
    """The family that stands for all on a single lane."""
    return "1f1b" if layout.schedule == FIT else layout.schedule


def _fitted(
    bench: Workbench,
    job: Job,
    pins: Mapping[str, Any],
    layout: Decisions,
    levels: Sequence[float],
    own: Evaluated | None,
    limits: Sequence[float],
) -> list[Evaluated]:
    """Orders fitted to each of these parts of the lanes' limits, rising; `own` is known already."""
    ways = choices(pins, replace(layout, recompute=layout.recompute if len(layout.recompute) == 1 else ("none",)))
    if len(layout.recompute) == 1 and 3 * layout.stage_count * layout.units > CHOOSING:
        ways = [layout.recompute]
    tables = tables_of(bench, job, layout, ways)
    found = [] if own is None else [own]
    for level in levels:
        one = fit_layout(bench, tables, [level * limit for limit in limits], moves=MOVES[0])
        if one is not None:
            found.append(one)
    kept: list[Evaluated] = []
    for one in sorted(found, key=lambda one: (one.peak_bytes / one.limit_bytes, one.step_s)):
        if not kept or one.step_s < kept[-1].step_s * (1 - 1e-6):
            kept.append(one)
    return kept


def _point(one: Evaluated) -> TradePoint:
    decisions = one.decisions
    return TradePoint(
        schedule=decisions.schedule,
        recompute=",".join(decisions.recompute),
        memory_bytes=scaled(one.peak_bytes, one.limit_bytes, min(one.simulation.least_bytes)),
        step_s=one.step_s,
        fits=one.simulation.fits,
    )
