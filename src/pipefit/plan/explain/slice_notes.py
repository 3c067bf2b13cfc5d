"""Notes of a plan on why its sequences are sliced or not."""

from __future__ import annotations

from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.request.constraints import Constraints, describe_choices
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.sliceable import slicing_obstacles
from pipefit.plan.types import Job
from pipefit.units import format_bytes, format_seconds

BEGIN = "slices: "
"""Prefix of the note, by which the headlines of a plan find it."""

LISTED_SLICES = 8
"""Largest number of slices whose tokens are all listed."""


def slice_note(context: PlannerContext, job: Job, constraints: Constraints, found: SearchResult) -> str:
    """Return a note on slices for a search result with a plan that fits.

    It names the chosen slicing and its gain over the best plan without slices; or the best sliced plan and why it lost;
    or why none was tried.
    """
    best = found.fitting[0]
    if best.decisions.slices:
        return BEGIN + _chosen_note(best, _first_plan(found, sliced=False), constraints)
    return BEGIN + "not used: " + _unused_note(context, job, constraints, found)


def format_slices(slices: tuple[int, ...]) -> str:
    """Return `1024, 768, 256`, or for many slices the first and the last: `512, 504, ..., 320`."""
    if len(slices) <= LISTED_SLICES:
        return ", ".join(map(str, slices))
    return f"{slices[0]}, {slices[1]}, ..., {slices[-1]}"


def _chosen_note(best: EvaluatedPlan, whole: EvaluatedPlan | None, constraints: Constraints) -> str:
    slices = best.decisions.slices
    words = f"{len(slices)} per sequence, of {format_slices(slices)} tokens"
    if constraints.slices is not None:
        return f"{words}, as fixed"
    if whole is None:
        return f"{words}; no plan without slices fits"
    return (
        f"{words}; step {1 - best.step_s / whole.step_s:.1%} shorter than the best plan without slices, "
        f"{format_seconds(whole.step_s)} ({describe_choices(whole.decisions)})"
    )


def _unused_note(context: PlannerContext, job: Job, constraints: Constraints, found: SearchResult) -> str:
    if constraints.context_size > 1:
        return "sequences are split over devices"
    if constraints.slices == 1:
        return "fixed by --fix slices=1"
    obstacle = next(slicing_obstacles(context.model), None)
    if obstacle is not None:
        return f"the sequences of this model cannot be cut: {obstacle.what} ({obstacle.seen})"
    best, sliced = found.fitting[0], _first_plan(found, sliced=True)
    if sliced is not None:
        return _loss_reason(sliced, best)
    unfit = [misfit for misfit in found.misfits if misfit.decisions.slices and misfit.bound_s < best.step_s]
    if unfit:
        lacks = unfit[0].peak_bytes - unfit[0].limit_bytes
        return (
            f"{_describe_slices(unfit[0].decisions)} could be faster but lack {format_bytes(lacks)} on lane "
            f"{unfit[0].lane}"
        )
    if best.decisions.lane_count == 1:
        return "a single lane has no pipeline bubble to fill"
    return (
        f"with {_count_microbatches(best)} on {best.decisions.lane_count} lanes, sequences of {job.sequence} "
        "tokens and the "
        "overhead of every slice, no plan with slices was estimated to be faster"
    )


def _loss_reason(sliced: EvaluatedPlan, best: EvaluatedPlan) -> str:
    """Return the reason why the best sliced plan is slower: more work on its busiest lane, or no bubble to fill."""
    slower = sliced.step_s / best.step_s - 1
    if slower < 0:
        return f"the best plan with slices, {_describe_slices(sliced.decisions)}, takes only {-slower:.2%} less"
    mine, theirs = (float(plan.simulation.timeline.busy_s.max()) for plan in (sliced, best))
    words = f"the best plan with slices, {_describe_slices(sliced.decisions)}, takes {slower:.1%} longer"
    if mine - theirs > (sliced.step_s - best.step_s) / 2:
        return f"{words}: slicing adds {format_seconds(mine - theirs)} of work to its busiest lane"
    return f"{words}: with {_count_microbatches(best)} the pipeline bubble is small without slices"


def _count_microbatches(one: EvaluatedPlan) -> str:
    count = one.decisions.microbatches
    return f"{count} microbatch{'es' * (count > 1)}"


def _describe_slices(decisions: ParallelConfig) -> str:
    return (
        f"{len(decisions.slices)} slices of {format_slices(decisions.slices)} tokens in {describe_choices(decisions)}"
    )


def _first_plan(found: SearchResult, sliced: bool) -> EvaluatedPlan | None:
    return next((plan for plan in found.fitting if bool(plan.decisions.slices) == sliced), None)
