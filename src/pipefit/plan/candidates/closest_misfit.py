"""The candidate that lacks the least memory when none fits: a best-first search by a bound that needs no cut."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from pipefit.plan.bounds.step_bounds import min_in_flight
from pipefit.plan.cutting.cutter import LayerCutter
from pipefit.plan.cutting.layer_cut import LayerCut
from pipefit.plan.evaluate.outcome import InfeasiblePlan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job


def find_closest(cutter: LayerCutter, job: Job, choices: Iterable[ParallelConfig]) -> tuple[int, LayerCut] | None:
    """Return (index of the choice, its leanest cut) whose fullest lane lacks the fewest bytes; the first of equals.

    Exact over the closed form of every choice's leanest cut: the bounds only save cuts. Returns None without choices.
    """
    choices = list(choices)
    heap = [(least_missing_bytes(cutter, job, choice), index) for index, choice in enumerate(choices)]
    heapq.heapify(heap)
    best: tuple[float, int, LayerCut] | None = None
    while heap and (best is None or heap[0][0] <= best[0]):
        _, index = heapq.heappop(heap)
        cut = cutter.leanest_cut(job, choices[index])
        missing = missing_bytes(cut)
        if best is None or (missing, index) < best[:2]:
            best = missing, index, cut
    return None if best is None else (best[1], best[2])


def missing_bytes(cut: LayerCut) -> float:
    """Return the bytes the fullest lane of a cut needs beyond its memory; negative where memory is left."""
    return cut.floor_bytes[cut.fullest_lane] - cut.limit_bytes[cut.fullest_lane]


def misfit_of(bound_s: float, decisions: ParallelConfig, cut: LayerCut) -> InfeasiblePlan:
    """Return the candidate with this cut as infeasible, with the memory its fullest lane needs."""
    lane = cut.fullest_lane
    return InfeasiblePlan(replace(decisions, cuts=cut.cuts), bound_s, *cut.needs[lane], lane)


def least_missing_bytes(cutter: LayerCutter, job: Job, decisions: ParallelConfig) -> float:
    """Return a lower bound of `missing_bytes` over all cuts of these decisions.

    Each lane gets an equal part of the static memory and, with one stage a lane, of the activations of the fewest
    microbatches in flight; the memory of the largest device is subtracted.
    """
    static, saved, limit = cutter.floor_bytes(job, decisions)
    lanes, held = decisions.lane_count, 0
    if decisions.stage_count == lanes:
        held = (
            1
            if decisions.slices
            else _fewest_in_flight(decisions.schedule, decisions.lane_of_stage, decisions.microbatches)
        )
    return (static + held * saved) / lanes - limit


@lru_cache(maxsize=65536)
def _fewest_in_flight(schedule: str, placement: tuple[int, ...], microbatches: int) -> int:
    return min(min_in_flight(schedule, placement, microbatches))


def leanest_misfits(
    cutter: LayerCutter, job: Job, unfit: Iterable[tuple[float, ParallelConfig]], limit: int
) -> Iterator[InfeasiblePlan]:
    """Yield the leanest of these infeasible candidates, each with its bound, for every pair of replicas and stages; at
    most `limit`."""
    leanest: dict[tuple[int, int], tuple[float, float, ParallelConfig]] = {}
    for bound_s, decisions in unfit:
        grid = (len(decisions.replicas), decisions.stage_count)
        need = cutter.least_bytes(job, decisions)
        if grid not in leanest or need < leanest[grid][0]:
            leanest[grid] = (need, bound_s, decisions)
    for _, bound_s, decisions in list(leanest.values())[:limit]:
        cut = cutter.cut_layers(job, decisions) or cutter.leanest_cut(job, decisions)
        yield misfit_of(bound_s, decisions, cut)
