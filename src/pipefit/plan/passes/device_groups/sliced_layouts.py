"""Plans of groups whose sequences are cut into slices: the layouts that were simulated whole get slices afterwards.

What a pipeline of groups loses while it fills is what slices win back, so that a layout that lost without them may win
with them. Its groups, programs, and microbatches stay what they are; the slices are those of `plan/passes/reslice.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.reslice import reslice_best
from pipefit.plan.types import Job

LAYOUTS = 2
"""Layouts that get slices: those that would be the fastest if nothing were lost while they fill."""

DEVICES = 128
"""On more of them groups get no slices: every look costs more."""

NOTHING = SearchResult(fitting=(), misfits=(), unfit=0, lower_bound_s=0, open_bound_s=0, considered=0, simulated=0)


def with_slices(
    bench: PlannerContext, job: Job, pins: Mapping[str, Any], made: Sequence[EvaluatedPlan], best_s: float
) -> tuple[list[EvaluatedPlan], int]:
    """(The layouts of `made` with slices, where they are faster than without; how many were simulated for that).
    Layouts that could not beat `best_s` if they lost nothing while they fill are left out."""
    if bench.network.devices > DEVICES:
        return [], 0
    promising = [one for one in made if one.decisions.lane_count > 1 and _full_s(one) < best_s]
    found, simulated = [], 0
    layouts: set[tuple[int, ...]] = set()
    for one in sorted(promising, key=_full_s):
        if one.decisions.devices in layouts or len(layouts) == LAYOUTS:
            continue
        layouts.add(one.decisions.devices)
        kept = {"microbatches": one.decisions.microbatches, "shards": max(_lane_shards(one), key=sum)}
        again = reslice_best(bench, job, {**pins, **kept}, replace(NOTHING, fitting=(one,)))
        simulated += again.simulated
        found += [again.fitting[0]] if again.fitting[0] is not one else []
    return found, simulated


def _full_s(one: EvaluatedPlan) -> float:
    """The step without the units of a microbatch by which a pipeline fills and drains."""
    count = one.decisions.microbatches
    return one.step_s * count / (count + one.decisions.lane_count - 1)


def _lane_shards(one: EvaluatedPlan) -> list[tuple[int, ...]]:
    return [one.decisions.shards_of(lane) for lane in range(one.decisions.lane_count)]
