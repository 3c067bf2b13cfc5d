"""Memory against time on one layout: what each schedule family and each way of recomputing needs and takes, and the
orders fitted to limits between the least that works and the most that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipefit.errors import ScheduleError
from pipefit.plan.build import Workbench
from pipefit.plan.decisions import Decisions
from pipefit.plan.fitting import FIT, MANY, MOVES, choices, fit_layout, tables_of
from pipefit.plan.outcome import Evaluated
from pipefit.plan.search import evaluate
from pipefit.plan.space import RECOMPUTE
from pipefit.plan.types import Job, Recompute, TradePoint
from pipefit.schedule.families import FAMILIES

LEVELS, FEW = 7, 1
"""Limits that orders are fitted to: so many, and fewer where a fit has many actions."""


def trade(bench: Workbench, job: Job, pins: Mapping[str, Any], best: Evaluated) -> tuple[TradePoint, ...]:
    """The points of the chosen plan's layout (its replicas, lanes, microbatches, ZeRO-1, device order), by memory.

    Of fitted orders only those that are faster than every fitted one with less memory. Empty for a single lane.
    """
    layout = best.decisions
    if layout.lanes == 1:
        return ()
    many = 3 * layout.stage_count * layout.microbatches > MANY
    found = list(_families(bench, job, pins, layout, many))
    highest = max([best.limit_bytes, *(one.peak_bytes for one in found)])
    lowest = min([best.peak_bytes, *(one.peak_bytes for one in found)])
    step = (min(highest, 1.5 * best.limit_bytes) - lowest) / (FEW if many else LEVELS)
    levels = [lowest + step * index for index in range((FEW if many else LEVELS) + 1)]
    own = best if layout.schedule == FIT else None
    fitted = _fitted(bench, job, pins, layout, levels, many, own)
    points = [_point(one) for one in (*found, *fitted)]
    points = [one for one in points if one != _point(best)] + [replace(_point(best), chosen=True)]
    return tuple(sorted(points, key=lambda one: (one.memory_bytes, one.step_s, one.schedule, one.recompute)))


def _families(
    bench: Workbench, job: Job, pins: Mapping[str, Any], layout: Decisions, many: bool
) -> Iterator[Evaluated]:
    """Every family and way of recomputing on these lanes, whether it fits or not."""
    layers = len(bench.module.layers)
    ways: Sequence[tuple[Recompute, ...]] = [pins["recompute"]] if "recompute" in pins else RECOMPUTE
    if many and layout.recompute in ways:
        ways = [layout.recompute]
    for name in sorted({*FAMILIES} - {FIT, "gpipe"}):
        placement = FAMILIES[name].placement(layout.lanes)
        if len(placement) > layers or layout.microbatches < FAMILIES[name].least_units(layout.lanes):
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
            except ScheduleError:
                continue


def _fitted(
    bench: Workbench,
    job: Job,
    pins: Mapping[str, Any],
    layout: Decisions,
    levels: Sequence[float],
    many: bool,
    own: Evaluated | None,
) -> list[Evaluated]:
    """Orders fitted to each of these limits, rising; `own` is known already."""
    ways = choices(pins, replace(layout, recompute=layout.recompute if len(layout.recompute) == 1 else ("none",)))
    if len(layout.recompute) == 1 and many:
        ways = [layout.recompute]
    tables = tables_of(bench, job, layout, ways)
    found = [] if own is None else [own]
    for level in levels:
        one = fit_layout(bench, tables, [level] * layout.lanes, moves=MOVES[0])
        if one is not None:
            found.append(one)
    kept: list[Evaluated] = []
    for one in sorted(found, key=lambda one: (max(map(float, one.simulation.timeline.peak_bytes)), one.step_s)):
        if not kept or one.step_s < kept[-1].step_s * (1 - 1e-6):
            kept.append(one)
    return kept


def _point(one: Evaluated) -> TradePoint:
    decisions = one.decisions
    return TradePoint(
        schedule=decisions.schedule,
        recompute=",".join(decisions.recompute),
        memory_bytes=one.peak_bytes,
        step_s=one.step_s,
    )
