"""A second search for the slices of the best plan: their number and lengths, judged by the simulator.

The main search cuts sequences to equal cost and tries few numbers of slices within a budget. Here the best plan's
layout gets another start: the microbatches and slices of TeraPipe's dynamic program (`plan/slicing/batch.py`) in every
schedule its placement allows. The program's objective is the sum of all slice times plus the pipeline bubble of the
longest slice. From the best start on, the simulator evaluates a few slicings around it (`plan/slicing/refine.py`) with
the schedule's own order, transfers and memory; the cut of the layers is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipefit.cost.types import Array, Ints
from pipefit.errors import ScheduleError
from pipefit.plan.bounds.estimates import sliced_guess_s
from pipefit.plan.candidates.sliced_grids import SPLIT_IDLE
from pipefit.plan.candidates.slicings import SequenceSlicer, slicer_of
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.passes.search import TIE
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.slicing.batch import best_batch
from pipefit.plan.slicing.cuts import TimeOf
from pipefit.plan.slicing.refine import Slices, SlicingScore, refine_slices
from pipefit.plan.slicing.terapipe import best_slicing
from pipefit.plan.types import Job
from pipefit.schedule.families import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class ReslicingBudget:
    """Budgets of the second search for slices. Actions are those of the simulated orders."""

    slicings: int = 24
    "Maximum number of slicings that are simulated around a start."
    total_actions: int = 60_000
    "Maximum number of actions of these slicings together, and of the starts together."
    start_actions: int = 30_000
    "Maximum number of actions of one start."
    microbatch_sizes: int = 4
    "Number of microbatch sizes, in rows, that are sliced: the most promising ones."
    step_slack: float = 0.1
    "Slicings around a start are tried if its step is at most this fraction longer than the best plan's."


RESLICING_BUDGET = ReslicingBudget()


def reslice_best(context: PlannerContext, job: Job, constraints: Constraints, found: SearchResult) -> SearchResult:
    """Return the search result, preceded by the best plan with other slices if they are faster.

    Constrained slices are kept, and so is a constrained number of slices.
    """
    fixed_slices = constraints.slices
    if not found.fitting or fixed_slices == 1 or isinstance(fixed_slices, tuple):
        return found
    slicer, best = slicer_of(context.layer_cutter, job, constraints), found.fitting[0]
    if slicer.obstacle is not None:
        return found
    tried = _simulate_starts(context, job, constraints, slicer, best) if fixed_slices is None else []
    start = min([best, *(plan for plan in tried if plan.simulation.fits_in_memory)], key=lambda plan: plan.step_s)
    if not start.decisions.slices:
        near = [plan for plan in tried if _plan_value(plan) <= (0.0, best.step_s * (1 + RESLICING_BUDGET.step_slack))]
        start = min(near, key=_plan_value, default=start)
    looked = {start.decisions.slices: start}

    def evaluate_slices(slices: Slices) -> SlicingScore:
        if slices not in looked:
            if len(slices) == 1 or (fixed_slices is not None and len(slices) != fixed_slices):
                return float("inf"), float("inf")
            try:
                looked[slices] = _evaluate_decisions(context, job, replace(start.decisions, slices=slices))
            except ScheduleError:
                return float("inf"), float("inf")
        return _plan_value(looked[slices])

    refined = start
    if start.decisions.slices:
        order = 3 * start.decisions.stage_count * start.decisions.unit_count
        evaluations = max(4, min(RESLICING_BUDGET.slicings, RESLICING_BUDGET.total_actions // order))
        multiple = slicer.token_multiple(len(start.decisions.slices))
        refined = looked[
            refine_slices([start.decisions.slices], evaluate_slices, multiple=multiple, evaluations=evaluations).slices
        ]
    simulated = found.simulated + len(tried) + len(looked) - 1
    if not refined.simulation.fits_in_memory or refined.step_s >= best.step_s * (1 - TIE):
        return replace(found, simulated=simulated)
    return replace(found, fitting=(refined, *found.fitting), simulated=simulated)


def _simulate_starts(
    context: PlannerContext, job: Job, constraints: Constraints, slicer: SequenceSlicer, best: EvaluatedPlan
) -> list[EvaluatedPlan]:
    """Return the simulated starts whose estimate is below the best plan's time, the most promising first."""
    simulated: list[EvaluatedPlan] = []
    guessed: list[tuple[float, int, ParallelConfig]] = []
    left, least_s = RESLICING_BUDGET.total_actions, best.step_s
    for index, decisions in enumerate(_iter_starts(job, constraints, slicer, best)):
        cut = context.layer_cutter.cut_layers(job, decisions)
        if cut is not None and cut.may_fit:
            laid = replace(decisions, cuts=cut.cuts)
            guessed.append((sliced_guess_s(*slicer.slice_times(laid), laid), index, laid))
    for guess_s, _, decisions in sorted(guessed, key=lambda guess: guess[:2]):
        actions = 3 * decisions.stage_count * decisions.unit_count
        if guess_s >= least_s or (actions > left and simulated) or actions > RESLICING_BUDGET.start_actions:
            continue
        try:
            simulated.append(_evaluate_decisions(context, job, decisions))
        except ScheduleError:
            continue
        left -= actions
        if simulated[-1].simulation.fits_in_memory:
            least_s = min(least_s, simulated[-1].step_s)
    return simulated


def _iter_starts(
    job: Job, constraints: Constraints, slicer: SequenceSlicer, best: EvaluatedPlan
) -> Iterator[ParallelConfig]:
    """Yield the best plan's layout with TeraPipe's microbatches and slices, in all schedules of its placement; not cut
    yet.

    Yields nothing for rows that are divided unevenly, or for a single lane.
    """
    layout = best.decisions
    if layout.lane_count == 1 or max(layout.replicas) > 1:
        return
    rows = job.batch // len(layout.replicas)
    placement, turns = layout.lane_of_stage, max(map(layout.lane_of_stage.count, layout.lane_of_stage))
    uncut = replace(layout, stages=layout.stage_count, cuts=constraints.cuts or (), slices=())
    sizes = _row_counts(job, constraints, slicer, best)
    if not sizes:
        return
    fill, times = 1 + (layout.lane_count - 1) / turns, _SliceTimes(slicer, uncut, rows, turns)
    parts = best_batch(job.sequence, rows, fill, times, multiple=slicer.finest_multiple, sizes=sizes).parts
    names = [constraints.schedule] if constraints.schedule is not None else sorted(FAMILIES)
    for size in dict.fromkeys(part.rows for part in parts):
        count = rows // size
        program = best_slicing(job.sequence, fill, times(size), multiple=slicer.finest_multiple, sequences=count)
        if len(program.slices) == 1:
            continue
        sliced = replace(uncut, microbatches=count, slices=program.slices)
        for name in names:
            family = FAMILIES.get(name)
            if family is None or not (constraints.schedule is not None or family.searched_with_slices):
                continue
            if family.placement(layout.lane_count) == placement and sliced.unit_count >= family.least_units(
                layout.lane_count
            ):
                yield replace(sliced, schedule=name)


def _row_counts(job: Job, constraints: Constraints, slicer: SequenceSlicer, best: EvaluatedPlan) -> list[int]:
    """Return microbatch sizes, in rows of a replica, whose slices may beat the best plan.

    They have the smallest closed-form time, assuming the short pipeline bubble of split backwards.
    """
    layout = best.decisions
    rows, placement = job.batch // len(layout.replicas), layout.lane_of_stage
    turns, sizes = max(map(placement.count, placement)), []
    for size in range(1, rows + 1):
        count = rows // size
        if rows % size or (constraints.microbatches is not None and count != constraints.microbatches):
            continue
        stage = slicer.slowest_stage(replace(layout, microbatches=count))
        steps_s = slicer.closed_form_s(stage, layout.lane_count, turns, count, SPLIT_IDLE)
        least_s = float(steps_s[1:].min(initial=float("inf")))
        if least_s < best.step_s:
            sizes.append((least_s, size))
    return [size for _, size in sorted(sizes)[: RESLICING_BUDGET.microbatch_sizes]]


class _SliceTimes:
    """The mean time of a slice on a lane, by the rows of a microbatch."""

    def __init__(self, slicer: SequenceSlicer, layout: ParallelConfig, rows: int, turns: int) -> None:
        self.slicer, self.layout, self.rows = slicer, layout, rows
        self.action_s = slicer.action_s(turns)

    def __call__(self, size: int) -> TimeOf:
        module_time = self.slicer.time_curve(
            self.slicer.slowest_stage(replace(self.layout, microbatches=self.rows // size))
        )

        def time_of(tokens: Ints, past: Ints) -> Array:
            return module_time(tokens, past) / self.layout.lane_count + self.action_s

        return time_of


def _evaluate_decisions(context: PlannerContext, job: Job, decisions: ParallelConfig) -> EvaluatedPlan:
    return evaluate_candidate(context, decisions, context.make_skeleton(job, decisions))


def _plan_value(one: EvaluatedPlan) -> SlicingScore:
    return (0.0 if one.simulation.fits_in_memory else max(1.0, one.peak_bytes - one.limit_bytes)), one.step_s
