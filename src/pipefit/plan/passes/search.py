"""The search for the fastest plan that fits: best first, by bounds that get tighter, decided by the simulator alone.

Every candidate waits in a heap under a lower bound of its step time. What comes out on top is looked at one level
closer: first the compute of a perfectly even cut, then that of its exact cut, then a whole cost table with links and
reductions, at last the simulation of its lowered lanes. When the top of the heap is a bound above the best simulated
time, no other plan of the space is faster: the result is optimal in its space, as far as the simulator is right.
Layouts come first, with the bound that holds for all their schedules; only those that can win are told apart by
schedule. Schedules whose backwards are split have loose bounds and much to gain, so they go first, within a budget; the
others follow, and are done with as soon as their tighter bounds lie above what was found. If a budget is spent before
the proof, the result says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import le
from typing import Any

from pipefit.cluster.topology import device_count
from pipefit.cost.memory.lanes import lane_limits
from pipefit.cost.pipeline.contention import pipelines
from pipefit.cost.pipeline.table import cost_table
from pipefit.errors import ScheduleError
from pipefit.plan.assemble.order import computed_schedule
from pipefit.plan.assemble.pipeline_work import pipeline_work
from pipefit.plan.bounds.estimates import sliced_guess_s
from pipefit.plan.bounds.in_flight import held_bytes, order_needs
from pipefit.plan.bounds.sliced_bounds import sliced_bound_s
from pipefit.plan.bounds.step_bounds import chain_bound_s, facts_of
from pipefit.plan.candidates.closest_misfit import closest, least_missing_bytes, misfit_of
from pipefit.plan.candidates.grid import Panel
from pipefit.plan.candidates.grid_bounds import Floors
from pipefit.plan.candidates.queue import Candidate, Queue, leanest_first, queues
from pipefit.plan.candidates.sliced_grids import Hope, best_sliced, most_promising, sliced
from pipefit.plan.candidates.slicings import slicer_of
from pipefit.plan.candidates.space import bases, check_space, families_only, rearrangements, whole
from pipefit.plan.cutting.cutter import Cut
from pipefit.plan.cutting.rows import Need, scaled
from pipefit.plan.evaluate.evaluate import simulated
from pipefit.plan.evaluate.outcome import Evaluated, Found, Misfit
from pipefit.plan.evaluate.planner_context import Workbench
from pipefit.plan.evaluate.port_contention import alone_bound_s
from pipefit.plan.request.decisions import Decisions, check_decisions
from pipefit.plan.request.sequence_length import check_length
from pipefit.plan.request.sliceable import check_sliceable, document_obstacles
from pipefit.plan.types import Job

EVEN, CUT, TABLE, SIMULATED = range(4)
"""How closely a candidate has been looked at."""

EXTRA_SIMULATIONS = 24
"""Simulations spent, after the best plan is known, on making the list of alternatives exact."""

BUDGET = 100_000
"""Work spent on either kind of schedules before the search stops without a proof: actions of the orders made, and
DEVICE for each device of a cost table. Only large clusters come near it, with families whose bounds are loose."""

SLICED = 40_000
"""Work spent on what cuts sequences, and again each time that it finds something faster: the best guess comes first."""

FEW = 128
"""With more devices than these, a stage's shards counted as one, less is spent on slices, in proportion: every look
costs more."""

MANY_DEVICES = 2048
"""For every so many devices a search may spend its budgets once more: a look costs more there."""

MIXED = 0.5
"""The part of its budgets that a search on several kinds of devices spends: it also has more candidates to list."""

PATIENCE = 200_000
"""Work after which even a search that has found nothing that fits stops, and says so."""

DEVICE = 3
"""What a device of a cost table counts in the budget: its cost beside that of an action."""

STAGE = 1
"""What a stage of a cut counts in the budget."""

ORDER = 4
"""Of what an order costs to make and simulate, the part that it costs to make: one over this."""

LEANER = 3
"""How often the layers of a candidate are cut again because the simulator found that it needs more memory than the
closed form says."""

STARTS, STEPS = 2, 24
"""On clusters of several kinds: plans that are rearranged, and simulations for each."""

MISFITS = 16
"""Candidates that cannot fit whose least memory is worked out exactly."""

TRIES = 64
"""Simulations spent on the question whether anything fits at all."""

TIE = 1e-9
"""Relative difference of step times that counts as none."""


Progress = Callable[[int, int, float | None], None]
"""(candidates left, simulations done, best step so far)."""


def search(
    bench: Workbench, job: Job, pins: Mapping[str, Any] | None = None, top: int = 5, progress: Progress | None = None
) -> Found:
    """The best plans of the space under `pins`. Raises PlanError where the pins leave nothing to consider."""
    pins = pins or {}
    searcher = _Search(bench, job, pins, top, progress)
    return searcher.run(_bases(bench, job, pins))


def some_plan_fits(bench: Workbench, job: Job, pins: Mapping[str, Any]) -> bool:
    """Whether `search` would find a plan: the leanest candidates first, until one fits or TRIES simulated ones do
    not. Raises PlanError as `search` does."""
    searcher = _Search(bench, job, pins, 1, None)
    space = _bases(bench, job, pins)
    searcher.any_that_fits([*searcher.whole(space), *searcher.sliced(space)])
    return bool(searcher.fitting)


def _bases(bench: Workbench, job: Job, pins: Mapping[str, Any]) -> list[Panel]:
    """The space before sequences are cut, for a job and pins that leave something to consider."""
    count, layers = device_count(bench.cluster), len(bench.module.layers)
    check_space(job, layers, count, pins)
    check_length(bench.module, bench.model, job.sequence, "--seq")
    if pins.get("slices", 1) not in (1, (job.sequence,)):
        check_sliceable(bench.model, "--fix slices")
    for error in document_obstacles(bench.model, "--documents") if job.documents == "apart" else ():
        raise error
    return list(bases(job, layers, count, len(bench.cluster.hosts), pins, bench.cutter))


class _Search:
    def __init__(
        self, bench: Workbench, job: Job, pins: Mapping[str, Any], top: int, progress: Progress | None
    ) -> None:
        self.bench = bench
        self.job = job
        self.pins = pins
        self.top = top
        self.progress = progress
        self.slicer = slicer_of(bench.cutter, job, pins)
        self.floors = Floors(bench.cutter, job, self.slicer)
        self.share = max(MIXED if bench.cutter.fleet.mixed else 1.0, bench.network.devices / MANY_DEVICES)
        self.few = min(1.0, FEW * len(pins.get("shards", (1,))) / bench.network.devices)
        self.fitting: list[Evaluated] = []
        self.misfits: list[Misfit] = []
        self.unfit: list[tuple[float, int, Decisions]] = []
        "Bound and choice of candidates that no cut makes fit."
        self.refused: list[ScheduleError] = []
        "Why schedule families could not make an order for a candidate."
        self.left: list[Queue | Candidate] = []
        "What was not looked at to its end."
        self.seen: set[Decisions] = set()
        "What was looked at, before it was cut."
        self.simulated = 0
        self.spent = 0

    def run(self, space: list[Panel]) -> Found:
        """Look at what does not cut sequences, then at what does; slices have to beat what does without."""
        plain = self.whole(space)
        parts = [[one for one in plain if facts_of(one.names[0]).fused == fused] for fused in (False, True)]
        parts = [part for part in parts if part]
        bounds = [self.explore(part, BUDGET, patient=part is parts[-1]) for part in parts]
        sliced = self.sliced(space)
        considered = sum(panel.candidates for panel in (*plain, *sliced))
        if considered == 1:
            check_decisions(
                (*plain, *sliced)[0].decisions(0), self.job, len(self.bench.module.layers), self.bench.network.devices
            )
        budget = SLICED * self.few / self.share
        bounds += [self.explore(sliced, budget, budget)] if sliced else []
        self._rearrange()
        self._runners_up()
        if self.refused and not self.fitting and not self.misfits and not self.unfit:
            raise self.refused[0]
        misfits = self.misfits + list(self._telling())
        misfits.sort(key=lambda misfit: (misfit.bound_s, misfit.peak_bytes))
        return Found(
            fitting=tuple(self.fitting),
            misfits=tuple(misfits),
            unfit=len(self.unfit) + len(self.misfits),
            lower_bound_s=min((least for least, _ in bounds), default=float("inf")),
            open_bound_s=min((left for _, left in bounds), default=float("inf")),
            considered=considered,
            simulated=self.simulated,
        )

    def whole(self, space: Sequence[Panel]) -> list[Panel]:
        """What does not cut sequences."""
        return [one for panel in space if (one := whole(panel, families_only(self.pins))) is not None]

    def sliced(self, space: Sequence[Panel]) -> list[Panel]:
        """What cuts them and may be faster than what was found."""
        if not self.fitting or self.pins.get("slices") is not None:
            made = (sliced(panel, self.job, families_only(self.pins), self.slicer) for panel in space)
            return [one for one in made if one is not None]
        hope = Hope(self.floors, self.fitting[0].step_s)
        return best_sliced(most_promising(space, hope, self.few), self.slicer, hope, self.few)

    def explore(
        self, space: Sequence[Panel], budget: float, more: float = 0.0, patient: bool = True
    ) -> tuple[float, float]:
        """Look at these until none that is left can win, or the budget is spent: (least bound, least bound left). Each
        time that something faster is found, there is at least `more` to spend. Who is `patient` goes beyond the budget
        until something fits, but not beyond PATIENCE."""
        self.spent = 0
        items: list[Queue | Candidate] = [*queues(self.floors, space)]
        lower_bound_s = min(item.bound_s for item in items)
        heap = [(item.key_s, index) for index, item in enumerate(items)]
        heapq.heapify(heap)
        until, best = self.share * budget, self.fitting[:1]
        while heap and self.spent <= (self.share * PATIENCE if patient and not self.fitting else until):
            _, index = heapq.heappop(heap)
            if self.fitting and items[index].bound_s > self.fitting[0].step_s * (1 + TIE):
                self.left.append(items[index])
            else:
                self._look(items, index, heap)
            if self.fitting[:1] != best:
                until, best = max(until, self.spent + self.share * more), self.fitting[:1]
        self.left += [items[index] for _, index in heap]
        return lower_bound_s, min((one.bound_s for one in self.left), default=float("inf"))

    def _look(self, items: list[Queue | Candidate], index: int, heap: list[tuple[float, int]]) -> None:
        """One level closer, and back into the heap what is not done with."""
        item = items[index]
        if isinstance(item, Candidate):
            again = self.look_closer(item, item.bound_s)
            if again is not None:
                item.bound_s = again
                heapq.heappush(heap, (item.key_s, index))
        else:
            for candidate in item.next():
                if candidate.decisions in self.seen:
                    continue
                self.seen.add(candidate.decisions)
                heapq.heappush(heap, (candidate.key_s, len(items)))
                items.append(candidate)
            if not item.empty:
                heapq.heappush(heap, (item.key_s, index))
        if self.progress is not None:
            self.progress(len(heap), self.simulated, self.fitting[0].step_s if self.fitting else None)

    def any_that_fits(self, space: Sequence[Panel]) -> None:
        """Look for any plan that fits: the leanest candidates first, up to TRIES simulations and PATIENCE of work."""
        for decisions in leanest_first(self.floors, space):
            if least_missing_bytes(self.bench.cutter, self.job, decisions) > 0:
                continue
            candidate = Candidate(decisions)
            while self.look_closer(candidate, 0.0) is not None:
                pass
            if self.fitting or self.simulated >= TRIES or self.spent > PATIENCE:
                return

    def _rearrange(self) -> None:
        """Where kinds of devices differ: from the best plans of a few grids, kinds are moved step by step, as long as
        that is faster in the simulator."""
        if not self.bench.cutter.fleet.mixed or self.pins.get("mapping", "search") != "search":
            return
        grids: dict[tuple[int, int], Evaluated] = {}
        for one in self.fitting:
            grids.setdefault((len(one.decisions.replicas), one.decisions.lanes), one)
        for start in list(grids.values())[:STARTS]:
            best: Evaluated | None = start
            until = self.simulated + STEPS
            while best is not None and self.simulated < until:
                best = next(filter(None, map(partial(self._better, best.step_s), self._near(best.decisions))), None)

    def _near(self, decisions: Decisions) -> Iterator[Decisions]:
        near = rearrangements(self.bench.cutter, self.job, decisions, self.pins)
        return (one for one in near if one not in self.seen)

    def _better(self, than_s: float, decisions: Decisions) -> Evaluated | None:
        """What the simulator says of a candidate, if that is faster; it is known from now on."""
        self.seen.add(decisions)
        candidate = Candidate(decisions)
        known = {id(one) for one in self.fitting}
        bound_s: float | None = 0.0
        while bound_s is not None and bound_s < than_s * (1 - TIE):
            bound_s = self.look_closer(candidate, bound_s)
        found = [one for one in self.fitting if id(one) not in known and one.step_s < than_s * (1 - TIE)]
        return found[0] if found else None

    def _runners_up(self) -> None:
        """Some more of what cannot win, least bound first, to make the list of alternatives exact."""
        items = self.left
        for item in items:
            if isinstance(item, Queue):
                item.by_bound()
        heap = [(item.bound_s, index) for index, item in enumerate(items)]
        heapq.heapify(heap)
        until = self.simulated + EXTRA_SIMULATIONS
        self.spent = int(0.75 * self.share * BUDGET)
        while heap and self.fitting and self.simulated < until and self.spent <= self.share * BUDGET:
            bound_s, index = heapq.heappop(heap)
            if len(self.fitting) >= self.top and bound_s > self.fitting[self.top - 1].step_s:
                break
            more: list[tuple[float, int]] = []
            self._look(items, index, more)
            for _, one in more:
                heapq.heappush(heap, (items[one].bound_s, one))

    def _telling(self) -> Iterator[Misfit]:
        """The candidates that no cut makes fit and are worth telling of: of the fastest ones the leanest of each
        grid of devices; where nothing fits, the one that lacks least."""
        cutter = self.bench.cutter
        if not self.fitting:
            known = self.unfit or ([] if self.misfits else list(self._unseen()))
            found = closest(cutter, self.job, [decisions for _, _, decisions in known])
            if found is not None:
                bound_s, _, decisions = known[found[0]]
                yield misfit_of(bound_s, decisions, found[1])
            return
        leanest: dict[tuple[int, int], tuple[float, float, Decisions]] = {}
        for bound_s, _, decisions in heapq.nsmallest(64 * MISFITS, self.unfit):
            grid = (len(decisions.replicas), decisions.stage_count)
            need = cutter.least_bytes(self.job, decisions)
            if grid not in leanest or need < leanest[grid][0]:
                leanest[grid] = (need, bound_s, decisions)
        for _, bound_s, decisions in list(leanest.values())[:MISFITS]:
            yield misfit_of(bound_s, decisions, cutter.cut(self.job, decisions) or cutter.leanest(self.job, decisions))

    def _unseen(self) -> Iterator[tuple[float, int, Decisions]]:
        """What was not looked at, with a bound."""
        for item in self.left:
            each = item.rest() if isinstance(item, Queue) else [item.decisions]
            yield from ((item.bound_s, 0, decisions) for decisions in each)

    def look_closer(self, candidate: Candidate, bound_s: float) -> float | None:
        """Raise the candidate by one level and return its new bound, or None when it is done with."""
        candidate.level += 1
        if candidate.level == CUT:
            return self._cut(candidate, bound_s)
        if candidate.level == TABLE:
            return self._table(candidate, bound_s)
        return self._simulate(candidate, bound_s)

    def _cut(self, candidate: Candidate, bound_s: float) -> float | None:
        self.spent += STAGE * candidate.decisions.stage_count
        cut = self.bench.cutter.cut(self.job, candidate.decisions)
        if cut is None or not cut.fits:
            self.unfit.append((bound_s, len(self.unfit), candidate.decisions))
            return None
        return self._take(candidate, cut, bound_s)

    def _held(self, decisions: Decisions, cut: Cut) -> list[float]:
        """The least memory of every lane with this cut, by what the schedule's own order holds."""
        if decisions.slices or facts_of(decisions.schedule).fused:
            return list(cut.floor_bytes)
        lanes, count = decisions.lane_of_stage, decisions.microbatches
        held = held_bytes(decisions.schedule, lanes, count, cut.saved_bytes)
        return [stays + kept for stays, kept in zip(cut.static_bytes, held, strict=True)]

    def _take(self, candidate: Candidate, cut: Cut, bound_s: float) -> float:
        """The bound of the candidate with this cut."""
        decisions = candidate.decisions = replace(candidate.decisions, cuts=cut.cuts)
        fused = facts_of(decisions.schedule).fused
        lanes, count = decisions.lane_of_stage, decisions.microbatches
        if decisions.slices:
            times = self.slicer.times(decisions)
            candidate.guess_s = sliced_guess_s(*times, decisions)
            return max(bound_s, sliced_bound_s(*times, lanes, count, fused))
        return max(bound_s, chain_bound_s(cut.forward_s, cut.backward_s, lanes, count, fused))

    def _table(self, candidate: Candidate, bound_s: float) -> float | None:
        cut = self.bench.cutter.leanest(self.job, candidate.decisions)
        held = self._held(candidate.decisions, cut)
        if not all(map(le, held, cut.limit_bytes)):
            every = zip(held, cut.limit_bytes, cut.needs, strict=True)
            needs = [(scaled(need, most, has), has) for need, most, (_, has) in every]
            return self._again(candidate, cut, needs, bound_s)
        self.spent += DEVICE * candidate.decisions.device_count
        candidate.parts = self.bench.parts(self.job, candidate.decisions)
        candidate.work = pipeline_work(candidate.parts, self.bench.programs)
        network, layers = self.bench.network, self.bench.layers
        candidate.costs = cost_table(candidate.work, network, layers)
        candidate.alone = pipelines(candidate.costs, candidate.work, network, layers)
        placement, count = candidate.parts.placement, candidate.decisions.microbatches
        table_s = alone_bound_s(candidate.alone, placement, count, candidate.decisions.schedule)
        if candidate.decisions.slices:  # what the table adds to the compute of the cut, the guess lacks as well
            candidate.guess_s += max(0.0, table_s - bound_s)
        return max(bound_s, table_s)

    def _simulate(self, candidate: Candidate, bound_s: float) -> float | None:
        parts, work, costs = candidate.parts, candidate.work, candidate.costs
        alone = candidate.alone
        assert parts is not None and work is not None and costs is not None
        candidate.work = candidate.costs = candidate.alone = None
        try:
            computed = computed_schedule(candidate.decisions.schedule, parts, costs)
        except ScheduleError as error:
            self.refused.append(error)
            return None
        actions = sum(map(len, computed.lanes))
        self.spent += actions // ORDER
        needs, decisions = order_needs(computed, costs, lane_limits(work, self.bench.network)), candidate.decisions
        if all(need <= has for need, has in needs):
            self.simulated += 1
            self.spent += actions - actions // ORDER
            found = simulated(self.bench, decisions, parts, work, costs, computed, alone)
            if found.simulation.fits:
                self.fitting.append(found)
                self.fitting.sort(key=lambda one: one.rank)
                return None
            needs = [(lane[0].peak_bytes, lane[0].limit_bytes) for lane in found.simulation.devices]
            bound_s = max(bound_s, found.step_s)
        return self._again(candidate, self.bench.cutter.leanest(self.job, decisions), needs, bound_s)

    def _again(self, candidate: Candidate, cut: Cut, needs: Sequence[Need], bound_s: float) -> float | None:
        """What becomes of a candidate that needs this on each lane with this cut, too much: the bound with another
        cut, in which what the closed form does not see has room, or None where there is none, or LEANER were tried."""
        decisions = candidate.decisions
        if "cuts" not in self.pins and candidate.leaner < LEANER:
            uncut = replace(decisions, stages=decisions.stage_count, cuts=())
            every = zip(needs, cut.limit_bytes, cut.floor_bytes, strict=True)
            spare = [max(0.0, scaled(need, has, most) - floor) for (need, has), most, floor in every]
            leaner = self.bench.cutter.cut(self.job, uncut, spare)
            if leaner is not None and leaner.cuts != cut.cuts:
                candidate.leaner += 1
                candidate.level = CUT
                return self._take(candidate, leaner, candidate.even_s)
        lane = max(range(len(needs)), key=lambda lane: needs[lane][0] / needs[lane][1])
        self.misfits.append(Misfit(decisions, bound_s, *needs[lane], lane))
        return None
