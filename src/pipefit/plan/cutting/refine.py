"""Refined cuts for lanes with several stages: the cut with the shortest step in the order of the schedule.

With several stages a lane, the busiest lane does not decide alone. In a V the embedding and the head share a lane, and
the division of other lanes' layers between their stages decides how well the passes interlock. So layers move between
stages, and every cut is timed by the sweep of the simulator, with the order of the family and the stage times of the
cut. It is a local search from several cuts; tests compare it with all cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from random import Random

import numpy as np

from pipefit.cost.types import Array, CostTable, EdgeCost
from pipefit.errors import ScheduleError
from pipefit.plan.assemble.order import computed_schedule, edge_keys
from pipefit.plan.assemble.pipeline_work import PlanSkeleton
from pipefit.plan.cutting.balance import balance_lanes
from pipefit.plan.cutting.cutter import LayerCutter
from pipefit.plan.cutting.layer_cut import cut_at
from pipefit.plan.cutting.memory import CutMemory
from pipefit.plan.cutting.rows import LayerRow
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.schedule.actions import Schedule
from pipefit.schedule.families import family_facts
from pipefit.schedule.taskgraph.compile import task_graph
from pipefit.schedule.taskgraph.table import CODE, SEND_B, SEND_F
from pipefit.schedule.taskgraph.times import run_sweep, task_durations

Bounds = tuple[int, ...]

CutScore = tuple[float, float]
"""(bytes missing, seconds): smaller is better."""

Costs = Callable[[tuple[int, ...]], CostTable]
"""Cuts -> their cost table."""

Peaks = Callable[[tuple[int, ...]], Sequence[float]]
"""Cuts -> the simulated peak of every lane, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRefinementBudget:
    """The work of one refinement of cuts, and the weight of memory in it."""

    timed_cuts: int = 1000
    "Largest number of cuts that one search times."
    timed_tasks: int = 1_000_000
    "Largest number of tasks timed over all cuts: long schedules get fewer cuts."
    moved_layers: tuple[int, ...] = (1, 2, 4)
    "Layers moved at once."
    full_memory_step_fraction: float = 0.01
    "Relative increase of the step time that is worth an empty device memory instead of a full one."
    min_simulated_cuts: int = 10
    "Smallest limit on the cuts whose memory is simulated."
    max_simulated_cuts: int = 200
    "Largest limit on the cuts whose memory is simulated."
    simulated_tasks: int = 300_000
    "Tasks of these simulations over all cuts, between the two limits."
    searches: int = 3
    "Repetitions of the search if its best cut needs more memory than its unlowered order showed."

    def timings(self, tasks: int) -> int:
        """Return the number of cuts of a schedule with this many tasks that one search times."""
        return min(self.timed_cuts, self.timed_tasks // max(1, tasks))

    def simulations(self, tasks: int) -> int:
        """Return the number of cuts of a schedule with this many tasks whose memory one search simulates."""
        return min(self.max_simulated_cuts, max(self.min_simulated_cuts, self.simulated_tasks // tasks))


CUT_REFINEMENT_BUDGET = CutRefinementBudget()


def refine_cuts(
    cutter: LayerCutter, job: Job, decisions: ParallelConfig, parts: PlanSkeleton, costs_of: Costs, peaks: Peaks
) -> tuple[int, ...]:
    """Return better cuts than those of `parts`, which the cutter found.

    They are returned unchanged if the decisions fix cuts, every lane holds one stage, sequences are sliced, or the
    family searches its order. Cuts that fit by `lane_peaks` come before cuts that do not. Among them the fastest in the
    sweep comes first, with ties broken by memory. Deterministic.
    """
    start_cuts = tuple(stage.layers[0] for stage in parts.stages[1:])
    placement = decisions.lane_of_stage
    one_each = max(map(placement.count, placement)) == 1
    if decisions.cuts or decisions.slices or one_each or family_facts(decisions.schedule).is_fitted:
        return start_cuts
    try:
        computed = computed_schedule(decisions.schedule, parts, costs_of(start_cuts))
    except ScheduleError:
        return start_cuts  # building the plan raises the error
    rows = cutter.stage_rows(job, decisions)
    bounds = (0, *start_cuts, len(rows[0].forward_s))
    graphs = [layer.graph for layer in cutter.programs.modules[cutter.module].layers]
    timer = _CutTimer(computed, parts, rows, graphs, costs_of)
    limits = cut_at(bounds, rows, decisions).limit_bytes
    judge = _CutScorer(timer, CutMemory(computed, rows).lane_peaks, limits)
    tried = {bounds: _missing_bytes(peaks(start_cuts), limits)}
    for _ in range(CUT_REFINEMENT_BUDGET.searches):
        best = _search_cuts(judge, _start_cuts(bounds, rows, placement))
        if best not in tried:
            tried[best] = judge.learn_peaks(best, peaks(best[1:-1]))
        if not tried[best]:
            break
    return min(tried, key=lambda cut: (tried[cut], timer.step_s(cut)))[1:-1]


class _CutScorer:
    """Score of a cut: (bytes missing, step time, increased slightly with the filled share of memory)."""

    def __init__(self, timer: _CutTimer, peaks: Callable[[Bounds], Sequence[float]], limits: Sequence[float]) -> None:
        self.timer, self.peaks, self.limits = timer, peaks, limits
        self.beyond = [0.0] * len(limits)
        "Memory of lanes beyond `lane_peaks` once the order is lowered, as seen for earlier cuts."
        self.looks = self.most_looks = CUT_REFINEMENT_BUDGET.simulations(timer.graph.size)
        "Cuts whose memory may still be simulated; `most_looks` is the limit of one search."
        self._known: dict[Bounds, Sequence[float]] = {}

    def score_cut(self, bounds: Bounds) -> CutScore:
        """Return the score of any cut; simulates its memory."""
        needs = [need + more for need, more in zip(self._simulate_peaks(bounds), self.beyond, strict=True)]
        filled = max(need / limit for need, limit in zip(needs, self.limits, strict=True))
        penalty = 1.0 + CUT_REFINEMENT_BUDGET.full_memory_step_fraction * filled
        return _missing_bytes(needs, self.limits), self.timer.step_s(bounds) * penalty

    def score_if_better(self, bounds: Bounds, than: CutScore) -> CutScore | None:
        """Return the score of a cut if it is better. Its memory is simulated only if its time does not exclude it."""
        if not than[0] and self.timer.step_s(bounds) >= than[1]:
            return None
        if bounds not in self._known and self.looks <= 0:
            return None
        score = self.score_cut(bounds)
        return score if score < than else None

    def learn_peaks(self, bounds: Bounds, peaks: Sequence[float]) -> float:
        """Record the peaks of a cut's lowered order. Returns the missing bytes."""
        lane_peaks = zip(self.beyond, peaks, self._simulate_peaks(bounds), strict=True)
        self.beyond = [max(more, float(peak) - known) for more, peak, known in lane_peaks]
        return _missing_bytes(peaks, self.limits)

    def _simulate_peaks(self, bounds: Bounds) -> Sequence[float]:
        if bounds not in self._known:
            self.looks -= 1
            self._known[bounds] = self.peaks(bounds)
        return self._known[bounds]


def _missing_bytes(needs: Sequence[float], limits: Sequence[float]) -> float:
    return fsum(max(0.0, float(need) - limit) for need, limit in zip(needs, limits, strict=True))


def _start_cuts(given: Bounds, rows: Sequence[LayerRow], placement: Sequence[int]) -> list[Bounds]:
    """Return the starting points of the search: the first cut, balanced lanes, equal numbers of layers."""
    times = np.stack([row.forward_s + row.backward_s for row in rows])
    equal = tuple(int(bound) for bound in np.round(np.linspace(0, given[-1], len(given))))
    return list(dict.fromkeys((given, balance_lanes(times, placement), equal)))


def _search_cuts(judge: _CutScorer, starts: Sequence[Bounds]) -> Bounds:
    """Return the best cut of local searches from every start, then from random moves away from the best so far."""
    timer, random = judge.timer, Random(len(starts))
    timer.left, judge.looks = timer.tries, judge.most_looks
    best = min((_climb_hill(judge, start) for start in starts), key=judge.score_cut)
    for _ in range(timer.tries):
        if timer.left <= 0 or judge.looks <= 0:
            break
        away = best
        for _ in range(random.randint(2, 4)):
            away = random.choice(list(_neighbour_cuts(away)) or [away])
        timer.left -= 1  # also if all neighbours are known already
        best = min(best, _climb_hill(judge, away), key=judge.score_cut)
    return best


def _climb_hill(judge: _CutScorer, start: Bounds) -> Bounds:
    """Return a cut without a better neighbour, or the last one when the tries end."""
    here, value = start, judge.score_cut(start)
    moved = True
    while moved:
        moved = False
        for bounds in _neighbour_cuts(here):
            if judge.timer.left <= 0:
                break
            if (score := judge.score_if_better(bounds, value)) is not None:
                here, value, moved = bounds, score, True
                break
    return here


def _neighbour_cuts(bounds: Bounds) -> Iterator[Bounds]:
    """Yield every cut that moves layers from one stage to another: few layers and near stages first."""
    stages = len(bounds) - 1
    sizes = [stop - start for start, stop in pairwise(bounds)]
    for count in CUT_REFINEMENT_BUDGET.moved_layers:
        for distance in range(1, stages):
            for first in range(stages - distance):
                for giver, taker in ((first, first + distance), (first + distance, first)):
                    if sizes[giver] > count:
                        step = -count if giver < taker else count
                        yield tuple(
                            bound + step if min(giver, taker) < index <= max(giver, taker) else bound
                            for index, bound in enumerate(bounds)
                        )


class _CutTimer:
    """Times of cuts in one order of the work. `graphs[l]` is the graph of layer l."""

    def __init__(
        self, computed: Schedule, parts: PlanSkeleton, rows: Sequence[LayerRow], graphs: Sequence[str], costs_of: Costs
    ) -> None:
        start_cuts = tuple(stage.layers[0] for stage in parts.stages[1:])
        costs = costs_of(start_cuts)
        self.graph = task_graph(computed, edge_keys(parts.edges))
        self.duration, self.transit = task_durations(self.graph, costs)
        self.left = self.tries = CUT_REFINEMENT_BUDGET.timings(self.graph.size)
        "Cuts that may still be timed; `tries` is the limit of one search."
        self._known: dict[Bounds, float] = {}
        self._overhead_s = costs.overhead_s
        self._graphs, self._costs_of = graphs, costs_of
        self._edges: dict[tuple[int, str], EdgeCost] = {}
        self._tasks = []
        for kind, seconds in _SECONDS.items():
            if CODE[kind] in self.graph.groups:
                tasks = self.graph.groups[CODE[kind]].tasks
                self._tasks.append((tasks, self.graph.stage[tasks], _prefix_sums([seconds(row) for row in rows])))
        self._transfers = [
            (np.flatnonzero((self.graph.kind == code) & (self.graph.edge == number)), source, direction)
            for number, (source, target, tensor) in enumerate(self.graph.table.edges)
            for code, direction in ((SEND_F, "forward"), (SEND_B, "backward"))
            if target == source + 1 and not tensor
        ]

    def step_s(self, bounds: Bounds) -> float:
        """Return the end time of the last action or transfer, without reductions and the optimizer."""
        if bounds not in self._known:
            self.left -= 1
            stage_indices, cut = np.arange(len(bounds) - 1), np.asarray(bounds)
            for tasks, stage, sums in self._tasks:
                self.duration[tasks] = (sums[stage_indices, cut[1:]] - sums[stage_indices, cut[:-1]])[
                    stage
                ] + self._overhead_s
            for tasks, source, direction in self._transfers:
                edge = self._edge_cost(bounds, source)
                self.duration[tasks] = getattr(edge, f"{direction}_port_s").flat[0]
                self.transit[tasks] = getattr(edge, f"{direction}_s").flat[0]
            self._known[bounds] = float(run_sweep(self.graph, self.duration, self.transit).moment_s.max())
        return self._known[bounds]

    def _edge_cost(self, bounds: Bounds, source: int) -> EdgeCost:
        """Return the cost of a stage's output edge. It depends on the stage's last layer: logits are larger than hidden
        states."""
        key = (source, self._graphs[bounds[source + 1] - 1])
        if key not in self._edges:
            for edge in self._costs_of(bounds[1:-1]).edges:
                if edge.target == edge.source + 1 and not edge.tensor:
                    self._edges[edge.source, self._graphs[bounds[edge.source + 1] - 1]] = edge
        return self._edges[key]


_SECONDS: dict[str, Callable[[LayerRow], Array]] = {
    "F": lambda row: row.forward_s,
    "I": lambda row: row.input_s,
    "W": lambda row: row.backward_s - row.input_s,
    "B": lambda row: row.backward_s,
}


def _prefix_sums(rows: Sequence[Array]) -> Array:
    """Return [stage][layer]: the sum over the layers before."""
    sums: Array = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(np.stack(rows), axis=1)], axis=1)
    return sums
