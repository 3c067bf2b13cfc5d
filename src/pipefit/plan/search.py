"""The search for the fastest plan that fits: best first, by bounds that get tighter, decided by the simulator alone.

Every candidate waits in a heap under a lower bound of its step time. What comes out on top is looked at one level
closer: first the compute of a perfectly even cut, then that of its exact cut, then a whole cost table with links and
reductions, at last the simulation of its lowered lanes. When the top of the heap is a bound above the best simulated
time, no other plan of the space is faster: the result is optimal in its space, as far as the simulator is right.
Schedule families with tight bounds (fused backwards) go first; the others follow within a budget, and if that is
spent, the result says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipefit.cluster.topology import device_count
from pipefit.cost.table import cost_table
from pipefit.cost.types import CostTable
from pipefit.cost.work import PipelineWork
from pipefit.errors import ScheduleError
from pipefit.plan.bounds import any_cut_bound_s, chain_bound_s, facts_of, order_floor_bytes, table_bound_s
from pipefit.plan.build import Workbench
from pipefit.plan.closest import closest, least_missing_bytes
from pipefit.plan.cut import Cut
from pipefit.plan.decisions import Decisions, check_decisions
from pipefit.plan.length import check_length
from pipefit.plan.order import computed_schedule
from pipefit.plan.predict import Simulation, lane_limits
from pipefit.plan.space import check_space, space
from pipefit.plan.types import Job
from pipefit.plan.work import Parts, pipeline_work
from pipefit.schedule.actions import Schedule
from pipefit.simulate import simulate

EVEN, CUT, TABLE, SIMULATED = range(4)
"""How closely a candidate has been looked at."""

EXTRA_SIMULATIONS = 24
"""Simulations spent, after the best plan is known, on making the list of alternatives exact."""

BUDGET = 400_000
"""Work spent before the search stops without a proof: actions of the orders made, and DEVICE for each device of a
cost table. Only large clusters come near it, with schedule families whose bounds are loose."""

DEVICE = 3
"""What a device of a cost table counts in the budget: its cost beside that of an action."""

MISFITS = 16
"""Candidates that cannot fit whose least memory is worked out exactly."""

TRIES = 64
"""Simulations spent on the question whether anything fits at all."""

TIE = 1e-9
"""Relative difference of step times that counts as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A simulated candidate."""

    decisions: Decisions
    "With its cuts."
    parts: Parts
    simulation: Simulation

    @property
    def step_s(self) -> float:
        return self.simulation.timeline.makespan_s

    @property
    def worst_lane(self) -> int:
        """The lane that is fullest for its limit."""
        limits = self.simulation.limits_bytes
        return max(range(len(limits)), key=lambda lane: self.simulation.timeline.peak_bytes[lane] / limits[lane])

    @property
    def peak_bytes(self) -> float:
        return float(self.simulation.timeline.peak_bytes[self.worst_lane])

    @property
    def limit_bytes(self) -> float:
        return self.simulation.limits_bytes[self.worst_lane]

    @property
    def rank(self) -> tuple[float, float, int, int]:
        """Faster first; among equally fast ones (within TIE) less memory, fewer devices, fewer stages."""
        return (float(f"{self.step_s:.9e}"), self.peak_bytes, self.decisions.device_count, self.decisions.stage_count)


@dataclass(frozen=True, slots=True)
class Misfit:
    """A candidate that cannot fit, by the closed form or by simulation."""

    decisions: Decisions
    bound_s: float
    "It would take at least this long."
    peak_bytes: float
    limit_bytes: float
    lane: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of a search."""

    fitting: tuple[Evaluated, ...]
    "Simulated and fitting, the best first; empty where nothing fits."
    misfits: tuple[Misfit, ...]
    "Of what did not fit the most telling ones, the fastest first; the closest of all where nothing fits."
    unfit: int
    "How many candidates that were looked at did not fit."
    lower_bound_s: float
    "No plan of the space is faster: the least closed-form bound of all, fitting or not."
    open_bound_s: float
    "The least bound of what was not looked at to its end; above the best time, unless the budget was spent."
    considered: int
    simulated: int


Progress = Callable[[int, int, float | None], None]
"""(candidates left, simulations done, best step so far)."""


def search(
    bench: Workbench, job: Job, pins: Mapping[str, Any] | None = None, top: int = 5, progress: Progress | None = None
) -> Found:
    """The best plans of the space under `pins`. Raises PlanError where the pins leave nothing to consider."""
    pins = pins or {}
    return _Search(bench, job, pins, top, progress).run(_choices(bench, job, pins))


def some_plan_fits(bench: Workbench, job: Job, pins: Mapping[str, Any]) -> bool:
    """Whether `search` would find a plan: the candidates that lack least first, until one fits or TRIES simulated ones
    do not. Raises PlanError as `search` does."""
    choices = _choices(bench, job, pins)
    missing = [least_missing_bytes(bench.cutter, job, choice) for choice in choices]
    order = sorted((least, index) for index, least in enumerate(missing) if least <= 0)
    searcher = _Search(bench, job, pins, 1, None)
    for _, index in order:
        candidate = _Candidate(choices[index])
        while searcher.look_closer(candidate, 0.0) is not None:
            pass
        if searcher.fitting or searcher.simulated >= TRIES:
            break
    return bool(searcher.fitting)


def _choices(bench: Workbench, job: Job, pins: Mapping[str, Any]) -> list[Decisions]:
    """The space, for a job and pins that leave something to consider."""
    count, layers = device_count(bench.cluster), len(bench.module.layers)
    check_space(job, layers, count, pins)
    check_length(bench.module, bench.model, job.sequence, "--seq")
    return list(space(job, layers, count, len(bench.cluster.hosts), pins))


@dataclass(slots=True)
class _Candidate:
    decisions: Decisions
    level: int = EVEN
    parts: Parts | None = None
    work: PipelineWork | None = None
    costs: CostTable | None = None


class _Search:
    def __init__(
        self, bench: Workbench, job: Job, pins: Mapping[str, Any], top: int, progress: Progress | None
    ) -> None:
        self.bench = bench
        self.job = job
        self.pins = pins
        self.top = top
        self.progress = progress
        self.fitting: list[Evaluated] = []
        self.misfits: list[Misfit] = []
        self.unfit: list[tuple[float, int, Decisions]] = []
        "Bound and choice of candidates that no cut makes fit."
        self.refused: list[ScheduleError] = []
        "Why schedule families could not make an order for a candidate."
        self.simulated = 0
        self.spent = 0

    def run(self, choices: list[Decisions]) -> Found:
        if len(choices) == 1:
            check_decisions(choices[0], self.job, len(self.bench.module.layers), self.bench.network.devices)
        fused = [_Candidate(choice) for choice in choices if facts_of(choice.schedule).fused]
        others = [_Candidate(choice) for choice in choices if not facts_of(choice.schedule).fused]
        bounds = [self.explore(candidates) for candidates in (fused, others) if candidates]
        if self.refused and not self.fitting and not self.misfits and not self.unfit:
            raise self.refused[0]
        misfits = self.misfits + list(self._telling())
        misfits.sort(key=lambda misfit: (misfit.bound_s, misfit.peak_bytes))
        return Found(
            fitting=tuple(self.fitting),
            misfits=tuple(misfits),
            unfit=len(self.unfit) + len(self.misfits),
            lower_bound_s=min(least for least, _ in bounds),
            open_bound_s=min(left for _, left in bounds),
            considered=len(choices),
            simulated=self.simulated,
        )

    def explore(self, candidates: list[_Candidate]) -> tuple[float, float]:
        """Look at these until none that is left can win, or the budget is spent: (least bound, least bound left)."""
        heap = [(self.even_bound_s(candidate.decisions), index) for index, candidate in enumerate(candidates)]
        lower_bound_s = min(bound for bound, _ in heap)
        heapq.heapify(heap)
        proven_at: int | None = None
        while heap:
            bound_s, index = heap[0]
            if self.fitting and bound_s > self.fitting[0].step_s * (1 + TIE):
                proven_at = self.simulated if proven_at is None else proven_at
                enough = len(self.fitting) >= self.top and bound_s > self.fitting[self.top - 1].step_s
                if enough or self.simulated - proven_at >= EXTRA_SIMULATIONS:
                    break
            if self.fitting and self.spent > BUDGET:
                break
            heapq.heappop(heap)
            again = self.look_closer(candidates[index], bound_s)
            if again is not None:
                heapq.heappush(heap, (max(again, bound_s), index))
            if self.progress is not None:
                self.progress(len(heap), self.simulated, self.fitting[0].step_s if self.fitting else None)
        return lower_bound_s, heap[0][0] if heap else float("inf")

    def _telling(self) -> Iterator[Misfit]:
        """The candidates that no cut makes fit and are worth telling of: of the fastest ones the leanest of each
        grid of devices; where nothing fits, the one that lacks least."""
        cutter = self.bench.cutter
        if not self.fitting:
            found = closest(cutter, self.job, [decisions for _, _, decisions in self.unfit])
            if found is not None:
                bound_s, _, decisions = self.unfit[found[0]]
                yield _misfit(bound_s, decisions, found[1])
            return
        leanest: dict[tuple[int, int], tuple[float, float, Decisions]] = {}
        for bound_s, _, decisions in heapq.nsmallest(64 * MISFITS, self.unfit):
            grid = (len(decisions.replicas), decisions.stage_count)
            need = cutter.least_bytes(self.job, decisions)
            if grid not in leanest or need < leanest[grid][0]:
                leanest[grid] = (need, bound_s, decisions)
        for _, bound_s, decisions in list(leanest.values())[:MISFITS]:
            yield _misfit(bound_s, decisions, cutter.cut(self.job, decisions) or cutter.leanest(self.job, decisions))

    def even_bound_s(self, decisions: Decisions) -> float:
        floor = self.bench.cutter.floor_s(self.job, decisions)
        fused = facts_of(decisions.schedule).fused and not decisions.slices
        return any_cut_bound_s(*floor, decisions.lanes, decisions.stage_count, decisions.microbatches, fused)

    def look_closer(self, candidate: _Candidate, bound_s: float) -> float | None:
        """Raise the candidate by one level and return its new bound, or None when it is done with."""
        candidate.level += 1
        if candidate.level == CUT:
            return self._cut(candidate, bound_s)
        if candidate.level == TABLE:
            return self._table(candidate)
        self._simulate(candidate, bound_s)
        return None

    def _cut(self, candidate: _Candidate, bound_s: float) -> float | None:
        decisions = candidate.decisions
        cut = self.bench.cutter.cut(self.job, decisions)
        if cut is None or not cut.fits:
            self.unfit.append((bound_s, len(self.unfit), decisions))
            return None
        candidate.decisions = replace(decisions, cuts=cut.cuts)
        if decisions.slices:
            return bound_s
        fused = facts_of(decisions.schedule).fused
        lanes, count = decisions.lane_of_stage, decisions.microbatches
        return max(bound_s, chain_bound_s(cut.forward_s, cut.backward_s, lanes, count, fused))

    def _table(self, candidate: _Candidate) -> float:
        self.spent += DEVICE * candidate.decisions.device_count
        candidate.parts = self.bench.parts(self.job, candidate.decisions)
        candidate.work = pipeline_work(candidate.parts, self.bench.programs)
        candidate.costs = cost_table(candidate.work, self.bench.network, self.bench.layers)
        return table_bound_s(
            candidate.costs, candidate.parts.placement, candidate.decisions.microbatches, candidate.decisions.schedule
        )

    def _simulate(self, candidate: _Candidate, bound_s: float) -> None:
        parts, work, costs = candidate.parts, candidate.work, candidate.costs
        assert parts is not None and work is not None and costs is not None
        candidate.work = candidate.costs = None
        try:
            computed = computed_schedule(candidate.decisions.schedule, parts, costs)
        except ScheduleError as error:
            self.refused.append(error)
            return
        self.spent += sum(map(len, computed.lanes))
        limits, floors = lane_limits(work, self.bench.network), order_floor_bytes(computed, costs)
        fullest = max(range(len(limits)), key=lambda lane: floors[lane] / limits[lane])
        if floors[fullest] > limits[fullest]:
            peak, limit = floors[fullest], limits[fullest]
            self.misfits.append(Misfit(candidate.decisions, bound_s, peak, limit, fullest))
            return
        self.simulated += 1
        found = simulated(self.bench, candidate.decisions, parts, work, costs, computed)
        if found.simulation.fits:
            self.fitting.append(found)
            self.fitting.sort(key=lambda one: one.rank)
            return
        bound_s = max(bound_s, found.step_s)
        self.misfits.append(Misfit(found.decisions, bound_s, found.peak_bytes, found.limit_bytes, found.worst_lane))


def _misfit(bound_s: float, decisions: Decisions, cut: Cut) -> Misfit:
    lane = cut.fullest
    return Misfit(replace(decisions, cuts=cut.cuts), bound_s, cut.floor_bytes[lane], cut.limit_bytes[lane], lane)


def evaluate(bench: Workbench, decisions: Decisions, parts: Parts) -> Evaluated:
    """Cost and simulate one candidate."""
    work = pipeline_work(parts, bench.programs)
    costs = cost_table(work, bench.network, bench.layers)
    return simulated(bench, decisions, parts, work, costs, computed_schedule(decisions.schedule, parts, costs))


def simulated(
    bench: Workbench, decisions: Decisions, parts: Parts, work: PipelineWork, costs: CostTable, computed: Schedule
) -> Evaluated:
    """Simulate one candidate: its family's order, lowered, under its own costs."""
    timeline = simulate(bench.lowered(parts, decisions, computed, costs), costs)
    cuts = tuple(stage.layers[0] for stage in parts.stages[1:])
    return Evaluated(
        decisions=replace(decisions, cuts=cuts),
        parts=parts,
        simulation=Simulation(timeline, costs, work, lane_limits(work, bench.network)),
    )
