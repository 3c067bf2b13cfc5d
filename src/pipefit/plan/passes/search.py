"""The search for the fastest plan that fits: best first, by bounds of increasing tightness, decided by the simulator.

Every candidate waits in a heap under a lower bound of its step time. The top of the heap is evaluated one level closer:
first the compute of a perfectly even cut, then of its exact cut, then a full cost table with links and reductions, then
the simulation of its first microbatches if there are many, at last the simulation of its lowered lanes. Once the
smallest bound in the heap exceeds the best simulated time, no other plan of the space is faster: the result is optimal
in its space, as far as the simulator is right.

Layouts come first, with a bound that holds for all their schedules; schedules are distinguished only for layouts that
can win. Schedules with fused backwards go first, because their bounds are tight. Those with split backwards follow,
within a budget. If a budget is spent before the proof, the result says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import le

from pipefit.cost.memory.lanes import lane_limits
from pipefit.cost.pipeline.contention import split_pipelines
from pipefit.cost.pipeline.table import cost_table
from pipefit.errors import ScheduleError
from pipefit.plan.assemble.order import computed_schedule
from pipefit.plan.assemble.pipeline_work import pipeline_work
from pipefit.plan.bounds.estimates import sliced_guess_s
from pipefit.plan.bounds.in_flight import PERIODS, in_flight_bytes, order_needs
from pipefit.plan.bounds.sliced_bounds import sliced_bound_s
from pipefit.plan.bounds.step_bounds import chain_bound_s
from pipefit.plan.candidates.closest_misfit import find_closest, leanest_misfits, misfit_of
from pipefit.plan.candidates.grid import CandidateGrid
from pipefit.plan.candidates.grid_bounds import LowerBounds
from pipefit.plan.candidates.queue import CandidateQueue, QueueEntry, SearchCandidate, build_queues
from pipefit.plan.candidates.sliced_grids import PruningThreshold, best_sliced_grids, most_promising, slice_grid
from pipefit.plan.candidates.slicings import slicer_of
from pipefit.plan.candidates.space import families_only, rearrange_kinds, unsliced_grid
from pipefit.plan.cutting.layer_cut import LayerCut
from pipefit.plan.cutting.rows import Need, scale_need
from pipefit.plan.evaluate.evaluate import simulate_candidate, simulate_order
from pipefit.plan.evaluate.outcome import EvaluatedPlan, InfeasiblePlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.port_contention import contended_costs, slowest_pipeline_bound_s
from pipefit.plan.passes.search_budget import SearchBudget
from pipefit.plan.passes.search_space import list_base_grids
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.request.decisions import ParallelConfig, check_config
from pipefit.plan.types import Job
from pipefit.schedule.families import family_facts

EVEN, CUT, TABLE, SHORT, SIMULATED = range(5)
"""Levels of evaluation of a candidate."""

SEARCH_BUDGET = SearchBudget()
"""The work that a search may spend. Counts of work, not seconds: the plan is the same on every machine."""

TIE = 1e-9
"""Relative difference below which step times count as equal."""


def search_plans(
    context: PlannerContext,
    job: Job,
    constraints: Constraints = NO_CONSTRAINTS,
    top: int = 5,
    budget: SearchBudget | None = None,
) -> SearchResult:
    """Return the best plans of the space under the constraints.

    Raises PlanError if the constraints leave nothing to consider.
    """
    searcher = LayoutSearch(context.split_sequences(constraints.context_size), job, constraints, top, budget)
    return searcher.run(list_base_grids(context, job, searcher.constraints))


class LayoutSearch:
    def __init__(
        self,
        context: PlannerContext,
        job: Job,
        constraints: Constraints,
        top: int,
        budget: SearchBudget | None = None,
    ) -> None:
        self.context = context
        self.job = job
        self.constraints = constraints.with_context_defaults
        self.top = top
        self.slicer = slicer_of(context.layer_cutter, job, constraints)
        self.floors = LowerBounds(context.layer_cutter, job, self.slicer)
        self.budget = budget or SEARCH_BUDGET
        self.share = max(
            self.budget.mixed_kinds_factor if context.layer_cutter.fleet.is_mixed else 1.0,
            context.network.devices / self.budget.scaling_devices,
        )
        self.few = min(1.0, self.budget.full_slicing_devices * constraints.shard_count / context.network.devices)
        self.fitting: list[EvaluatedPlan] = []
        self.misfits: list[InfeasiblePlan] = []
        self.unfit: list[tuple[float, int, ParallelConfig]] = []
        "Bound and choice of candidates for which no cut fits."
        self.queues: list[CandidateQueue] = []
        "The queues of all explored grids, which know the candidates that closed forms of memory ruled out."
        self.refused: list[ScheduleError] = []
        "Errors of schedule families that could not build an order for a candidate."
        self.left: list[QueueEntry] = []
        "Candidates that were not evaluated to the last level."
        self.seen: set[ParallelConfig] = set()
        "Candidates that were evaluated, before their cuts."
        self.simulated = 0
        self.spent = 0.0

    def run(self, space: list[CandidateGrid]) -> SearchResult:
        """Search plans without slices, then plans with slices, which have to beat the former."""
        plain = self.unsliced_grids(space)
        parts = [[grid for grid in plain if family_facts(grid.names[0]).fused == fused] for fused in (True, False)]
        parts = [part for part in parts if part]
        bounds = [self.explore_grids(part, self.budget.order_actions, patient=part is parts[-1]) for part in parts]
        sliced = self.promising_sliced(space)
        considered = sum(grid.candidate_count for grid in (*plain, *sliced))
        if considered == 1:
            decisions, layers = (*plain, *sliced)[0].decisions_at(0), len(self.context.only_module.layers)
            check_config(decisions, self.job, layers, self.context.network.devices)
        budget = self.budget.sliced_actions * self.few / self.share
        bounds += [self.explore_grids(sliced, budget, budget)] if sliced else []
        self._improve_kinds()
        self._simulate_runners_up()
        ruled_out = sum(queue.ruled_out_count for queue in self.queues)
        if self.refused and not self.fitting and not self.misfits and not self.unfit and not ruled_out:
            raise self.refused[0]
        misfits = self.misfits + list(self._reported_misfits())
        misfits.sort(key=lambda misfit: (misfit.bound_s, misfit.peak_bytes))
        return SearchResult(
            fitting=tuple(self.fitting),
            misfits=tuple(misfits),
            unfit=len(self.unfit) + len(self.misfits) + ruled_out,
            lower_bound_s=min((least for least, _ in bounds), default=float("inf")),
            open_bound_s=min((left for _, left in bounds), default=float("inf")),
            considered=considered,
            simulated=self.simulated,
        )

    def unsliced_grids(self, space: Sequence[CandidateGrid]) -> list[CandidateGrid]:
        """Return the grids without slices."""
        unsliced_grids = (unsliced_grid(grid, families_only(self.constraints)) for grid in space)
        return [unsliced for unsliced in unsliced_grids if unsliced is not None]

    def promising_sliced(self, space: Sequence[CandidateGrid]) -> list[CandidateGrid]:
        """Return the sliced grids that may beat the best plan so far."""
        if self.constraints.slices is not None:
            families = families_only(self.constraints)
            sliced_grids = (slice_grid(grid, self.job, families, self.slicer) for grid in space)
            return [sliced for sliced in sliced_grids if sliced is not None]
        threshold = PruningThreshold(self.floors, self.fitting[0].step_s if self.fitting else float("inf"))
        return best_sliced_grids(most_promising(space, threshold, self.few), self.slicer, threshold, self.few)

    def explore_grids(
        self, space: Sequence[CandidateGrid], budget: float, more: float = 0.0, patient: bool = True
    ) -> tuple[float, float]:
        """Evaluate these grids until no remaining candidate can win, or the budget is spent.

        Returns (smallest bound, smallest bound of the remaining candidates). After each improvement there is at least
        `more` to spend. A `patient` search exceeds the budget until something fits, up to `infeasible_actions`.
        """
        self.spent = 0.0
        queues = build_queues(self.floors, space)
        self.queues += queues
        items: list[QueueEntry] = [queue for queue in queues if not queue.is_empty]
        lower_bound_s = min((item.bound_s for item in items), default=float("inf"))
        self.context.tracker.add_bound(lower_bound_s)
        heap = [(item.key_s, index) for index, item in enumerate(items)]
        heapq.heapify(heap)
        until, best = self.share * budget, self.fitting[:1]
        while heap and self.spent <= (
            self.share * self.budget.infeasible_actions if patient and not self.fitting else until
        ):
            _, index = heapq.heappop(heap)
            if self.fitting and self._cannot_win(items[index]):
                self.left.append(items[index])
            else:
                self._advance_entry(items, index, heap)
            if self.fitting[:1] != best:
                again = more if best else max(more, self.budget.first_fit_actions)
                until, best = max(until, self.spent + self.share * again), self.fitting[:1]
        self.left += self._finish_estimates([items[index] for _, index in heap])
        return lower_bound_s, min((entry.bound_s for entry in self.left), default=float("inf"))

    def _finish_estimates(self, waiting: list[QueueEntry]) -> list[QueueEntry]:
        """Simulate the candidates whose estimates would win, the fastest first, until one fits: the budget ended before
        they were simulated. Returns the entries that are still waiting."""
        estimated = [item for item in waiting if isinstance(item, SearchCandidate) and item.is_estimated]
        finished, best = set[int](), self.fitting[:1]
        for candidate in sorted(estimated, key=lambda candidate: candidate.guess_s):
            if self.fitting[:1] != best or (best and self._cannot_win(candidate)):
                break
            again: float | None = candidate.bound_s
            while again is not None and candidate.is_estimated:
                again = self.raise_level(candidate, again)
            if again is None:
                finished.add(id(candidate))
            else:
                candidate.bound_s = again
        return [item for item in waiting if id(item) not in finished]

    def _cannot_win(self, item: QueueEntry) -> bool:
        """Return whether a bound, or a simulation of the first microbatches, exceeds the best step."""
        best_s = self.fitting[0].step_s
        if isinstance(item, SearchCandidate) and item.is_estimated:
            return item.guess_s > best_s * (1 + self.budget.estimate_margin)
        return item.bound_s > best_s * (1 + TIE)

    def _advance_entry(self, items: list[QueueEntry], index: int, heap: list[tuple[float, int]]) -> None:
        """Evaluate an entry one level closer, and push it back into the heap unless it is finished."""
        item = items[index]
        if isinstance(item, SearchCandidate):
            again = self.raise_level(item, item.bound_s)
            if again is not None:
                item.bound_s = again
                heapq.heappush(heap, (item.key_s, index))
        else:
            for candidate in item.take_next():
                if candidate.decisions in self.seen:
                    continue
                self.seen.add(candidate.decisions)
                heapq.heappush(heap, (candidate.key_s, len(items)))
                items.append(candidate)
            if not item.is_empty:
                heapq.heappush(heap, (item.key_s, index))
        self.context.tracker.count_left(len(heap))

    def _improve_kinds(self) -> None:
        """Rearrange kinds of devices step by step, from the best plans of a few grids, while the simulated step gets
        shorter."""
        if not self.context.layer_cutter.fleet.is_mixed or self.constraints.mapping not in (None, "search"):
            return
        grids: dict[tuple[int, int], EvaluatedPlan] = {}
        for plan in self.fitting:
            grids.setdefault((len(plan.decisions.replicas), plan.decisions.lane_count), plan)
        for start in list(grids.values())[: self.budget.rearranged_plans]:
            best: EvaluatedPlan | None = start
            until = self.simulated + self.budget.rearranging_simulations
            while best is not None and self.simulated < until:
                faster = map(partial(self._simulate_if_faster, best.step_s), self._unseen_neighbours(best.decisions))
                best = next(filter(None, faster), None)

    def _unseen_neighbours(self, decisions: ParallelConfig) -> Iterator[ParallelConfig]:
        near = rearrange_kinds(self.context.layer_cutter, self.job, decisions, self.constraints)
        return (neighbour for neighbour in near if neighbour not in self.seen)

    def _simulate_if_faster(self, than_s: float, decisions: ParallelConfig) -> EvaluatedPlan | None:
        """Return the simulated candidate if it is faster; it counts as seen from now on."""
        self.seen.add(decisions)
        candidate = SearchCandidate(decisions)
        known = {id(plan) for plan in self.fitting}
        bound_s: float | None = 0.0
        while bound_s is not None and bound_s < than_s * (1 - TIE):
            bound_s = self.raise_level(candidate, bound_s)
        faster = [plan for plan in self.fitting if id(plan) not in known and plan.step_s < than_s * (1 - TIE)]
        return faster[0] if faster else None

    def _simulate_runners_up(self) -> None:
        """Evaluate more candidates that cannot win, smallest bound first, to make the list of alternatives exact."""
        items = self.left
        for item in items:
            if isinstance(item, CandidateQueue):
                item.order_by_bound()
        heap = [(item.bound_s, index) for index, item in enumerate(items)]
        heapq.heapify(heap)
        until = self.simulated + self.budget.alternative_simulations
        self.spent = 0.75 * self.share * self.budget.order_actions
        while heap and self.fitting and self.simulated < until and self.spent <= self.share * self.budget.order_actions:
            bound_s, index = heapq.heappop(heap)
            if len(self.fitting) >= self.top and bound_s > self.fitting[self.top - 1].step_s:
                break
            more: list[tuple[float, int]] = []
            self._advance_entry(items, index, more)
            for _, entry in more:
                heapq.heappush(heap, (items[entry].bound_s, entry))

    def _reported_misfits(self) -> Iterator[InfeasiblePlan]:
        """Yield the infeasible candidates worth reporting.

        Among the fastest ones these are the leanest of each grid of devices; if nothing fits, the candidate that lacks
        least.
        """
        cutter = self.context.layer_cutter
        below_s = self.fitting[0].step_s if self.fitting else float("inf")
        leanest_of_grids = filter(None, (queue.leanest_ruled_out(below_s) for queue in self.queues))
        unfit = [*self.unfit, *((bound_s, -1 - n, config) for n, (bound_s, config) in enumerate(leanest_of_grids))]
        if not self.fitting:
            known = unfit or ([] if self.misfits else list(self._unseen_candidates()))
            closest = find_closest(cutter, self.job, [decisions for _, _, decisions in known])
            if closest is not None:
                bound_s, _, decisions = known[closest[0]]
                yield misfit_of(bound_s, decisions, closest[1])
            return
        fastest = heapq.nsmallest(64 * self.budget.exact_misfits, unfit)
        choices = [(bound_s, decisions) for bound_s, _, decisions in fastest]
        yield from leanest_misfits(cutter, self.job, choices, self.budget.exact_misfits)

    def _unseen_candidates(self) -> Iterator[tuple[float, int, ParallelConfig]]:
        """Yield the remaining candidates, with a bound."""
        for item in self.left:
            remaining = item.remaining_decisions() if isinstance(item, CandidateQueue) else [item.decisions]
            yield from ((item.bound_s, 0, decisions) for decisions in remaining)

    def raise_level(self, candidate: SearchCandidate, bound_s: float) -> float | None:
        """Evaluate the candidate one level closer and return its new bound, or None when it is finished."""
        candidate.level += 1
        if candidate.level == CUT:
            return self._cut_candidate(candidate, bound_s)
        if candidate.level == TABLE:
            return self._tabulate_costs(candidate, bound_s)
        if candidate.level == SHORT and self._has_long_steady_state(candidate.decisions):
            return self._simulate_few_microbatches(candidate, bound_s)
        candidate.level = SIMULATED
        return self._simulate_candidate(candidate, bound_s)

    def _has_long_steady_state(self, decisions: ParallelConfig) -> bool:
        """Return whether an estimate from the first microbatches is worth it."""
        return decisions.unit_count >= self.budget.steady_state_factor * PERIODS * decisions.lane_count

    def _simulate_few_microbatches(self, candidate: SearchCandidate, bound_s: float) -> float | None:
        """Estimate the step from its first microbatches: PERIODS a lane, and the time that the last lanes of them add.

        A lane holds the most activations within these microbatches, so memory is decided here.
        """
        parts, work, costs = candidate.parts, candidate.work, candidate.costs
        assert parts is not None and work is not None and costs is not None
        candidate.costs = costs = contended_costs(self.context, work, costs, candidate.alone)
        decisions, lanes = candidate.decisions, candidate.decisions.lane_count
        limits, short = lane_limits(work, self.context.network), PERIODS * lanes
        steps_s = []
        for microbatches in (short, short - lanes):
            few = replace(parts, microbatches=microbatches)
            try:
                computed = computed_schedule(decisions.schedule, few, costs)
            except ScheduleError as error:
                self.refused.append(error)
                return None
            self.spent += sum(map(len, computed.lanes))
            needs = order_needs(computed, costs, limits)
            if any(need > has for need, has in needs):
                cut = self.context.layer_cutter.leanest_cut(self.job, decisions)
                return self._retry_leaner(candidate, cut, needs, bound_s)
            plan = simulate_order(self.context, decisions, few, work, costs, computed, candidate.alone)
            steps_s.append(plan.step_s)
            if not plan.simulation.fits_in_memory:
                needs = [(lane[0].peak_bytes, lane[0].limit_bytes) for lane in plan.simulation.device_peaks]
                cut = self.context.layer_cutter.leanest_cut(self.job, decisions)
                return self._retry_leaner(candidate, cut, needs, bound_s)
        more = (decisions.microbatches - short) / lanes
        candidate.guess_s = max(bound_s, steps_s[0] + more * (steps_s[0] - steps_s[1]))
        candidate.is_estimated = True
        return bound_s

    def _cut_candidate(self, candidate: SearchCandidate, bound_s: float) -> float | None:
        self.spent += self.budget.cut_actions(candidate.decisions.stage_count)
        cut = self.context.layer_cutter.cut_layers(self.job, candidate.decisions)
        if cut is None or not cut.may_fit:
            self.unfit.append((bound_s, len(self.unfit), candidate.decisions))
            return None
        return self._apply_cut(candidate, cut, bound_s)

    def _lane_memory(self, decisions: ParallelConfig, cut: LayerCut) -> list[float]:
        """Return the minimum memory of every lane with this cut, by the activations the schedule's own order holds."""
        fused = family_facts(decisions.schedule).fused
        if decisions.slices or fused:
            return list(cut.floor_bytes)
        lanes, count = decisions.lane_of_stage, decisions.microbatches
        held = in_flight_bytes(decisions.schedule, lanes, count, cut.saved_bytes, cut.pending_bytes)
        return [stays + activations for stays, activations in zip(cut.static_bytes, held, strict=True)]

    def _apply_cut(self, candidate: SearchCandidate, cut: LayerCut, bound_s: float) -> float:
        """Return the bound of the candidate with this cut."""
        decisions = candidate.decisions = replace(candidate.decisions, cuts=cut.cuts)
        fused = family_facts(decisions.schedule).fused
        lanes, count = decisions.lane_of_stage, decisions.microbatches
        if decisions.slices:
            times = self.floors.traffic.add_to_slices(decisions, *self.slicer.slice_times(decisions))
            candidate.guess_s = sliced_guess_s(*times, decisions)
            return max(bound_s, sliced_bound_s(*times, lanes, count, fused))
        return max(bound_s, chain_bound_s(*self.floors.traffic.stage_times_s(decisions, cut), lanes, count, fused))

    def _tabulate_costs(self, candidate: SearchCandidate, bound_s: float) -> float | None:
        cut = self.context.layer_cutter.leanest_cut(self.job, candidate.decisions)
        held = self._lane_memory(candidate.decisions, cut)
        if not all(map(le, held, cut.limit_bytes)):
            lane_memory = zip(held, cut.limit_bytes, cut.needs, strict=True)
            needs = [(scale_need(need, limit, has), has) for need, limit, (_, has) in lane_memory]
            return self._retry_leaner(candidate, cut, needs, bound_s)
        self.spent += self.budget.actions_per_table_device * candidate.decisions.device_count
        candidate.parts = self.context.make_skeleton(self.job, candidate.decisions)
        candidate.work = pipeline_work(candidate.parts, self.context.programs)
        network, layers = self.context.network, self.context.layers
        candidate.costs = cost_table(candidate.work, network, layers)
        candidate.alone = split_pipelines(candidate.costs, candidate.work, network, layers)
        placement, count = candidate.parts.placement, candidate.decisions.microbatches
        table_s = slowest_pipeline_bound_s(candidate.alone, placement, count, candidate.decisions.schedule)
        if candidate.decisions.slices:  # the guess lacks the costs that the table adds to the compute
            candidate.guess_s += max(0.0, table_s - bound_s)
        return max(bound_s, table_s)

    def _simulate_candidate(self, candidate: SearchCandidate, bound_s: float) -> float | None:
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
        self.spent += actions // self.budget.order_fraction
        needs, decisions = order_needs(computed, costs, lane_limits(work, self.context.network)), candidate.decisions
        if all(need <= has for need, has in needs):
            self.simulated += 1
            self.spent += actions - actions // self.budget.order_fraction
            simulated = simulate_candidate(self.context, decisions, parts, work, costs, computed, alone)
            if simulated.simulation.fits_in_memory:
                self.fitting.append(simulated)
                self.fitting.sort(key=lambda plan: plan.rank_key)
                return None
            needs = [(lane[0].peak_bytes, lane[0].limit_bytes) for lane in simulated.simulation.device_peaks]
            bound_s = max(bound_s, simulated.step_s)
        return self._retry_leaner(candidate, self.context.layer_cutter.leanest_cut(self.job, decisions), needs, bound_s)

    def _retry_leaner(
        self, candidate: SearchCandidate, cut: LayerCut, needs: Sequence[Need], bound_s: float
    ) -> float | None:
        """Retry a candidate that exceeded memory with a leaner cut that reserves the measured excess.

        `needs` are the bytes needed on each lane with this cut. Returns the new bound, or None if no cut fits or all
        retries were used.
        """
        decisions = candidate.decisions
        if self.constraints.cuts is None and candidate.leaner < self.budget.leaner_cuts:
            uncut = replace(decisions, stages=decisions.stage_count, cuts=())
            lane_memory = zip(needs, cut.limit_bytes, cut.floor_bytes, strict=True)
            spare = [max(0.0, scale_need(need, has, limit) - floor) for (need, has), limit, floor in lane_memory]
            leaner = self.context.layer_cutter.cut_layers(self.job, uncut, spare)
            if leaner is not None and leaner.cuts != cut.cuts:
                candidate.leaner += 1
                candidate.level, candidate.is_estimated = CUT, False
                return self._apply_cut(candidate, leaner, candidate.even_s)
        lane = max(range(len(needs)), key=lambda lane: needs[lane][0] / needs[lane][1])
        self.misfits.append(InfeasiblePlan(decisions, bound_s, *needs[lane], lane))
        return None
