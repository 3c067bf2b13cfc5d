"""Why a plan cuts its sequences into slices or does not, for its notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.plan.evaluate.outcome import EvaluatedPlan, SearchResult
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.request.constraints import describe_choices
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.sliceable import slicing_obstacles
from pipefit.plan.types import Job
from pipefit.units import format_bytes, format_seconds

BEGIN = "slices: "
"""How the note begins, by which the headlines of a plan find it."""

SHOWN = 8
"""Slices whose tokens are told one by one."""


def slice_note(bench: PlannerContext, job: Job, pins: Mapping[str, Any], found: SearchResult) -> str:
    """The chosen slicing and what it gains against the best plan without slices of the same search; or the best sliced
    plan and why it lost; or why none was tried. `found` fits something."""
    best = found.fitting[0]
    if best.decisions.slices:
        return BEGIN + _chosen_note(best, _first_plan(found, sliced=False), pins)
    return BEGIN + "not used: " + _unused_note(bench, job, pins, found)


def format_slices(slices: tuple[int, ...]) -> str:
    """`1024, 768, 256`, or of many the first and the last: `512, 504, ..., 320`."""
    if len(slices) <= SHOWN:
        return ", ".join(map(str, slices))
    return f"{slices[0]}, {slices[1]}, ..., {slices[-1]}"


def _chosen_note(best: EvaluatedPlan, whole: EvaluatedPlan | None, pins: Mapping[str, Any]) -> str:
    slices = best.decisions.slices
    words = f"{len(slices)} of every sequence, of {format_slices(slices)} tokens"
    if pins.get("slices") is not None:
        return f"{words}, as fixed"
    if whole is None:
        return f"{words}; no plan without slices was found to fit"
    return (
        f"{words}; {1 - best.step_s / whole.step_s:.1%} less than the best plan without slices, "
        f"{format_seconds(whole.step_s)} ({describe_choices(whole.decisions)})"
    )


def _unused_note(bench: PlannerContext, job: Job, pins: Mapping[str, Any], found: SearchResult) -> str:
    if pins.get("slices") == 1:
        return "fixed so"
    obstacle = next(slicing_obstacles(bench.model), None)
    if obstacle is not None:
        return f"the model cannot be cut: {obstacle.what} ({obstacle.seen})"
    best, sliced = found.fitting[0], _first_plan(found, sliced=True)
    if sliced is not None:
        return _loss_reason(sliced, best)
    unfit = [misfit for misfit in found.misfits if misfit.decisions.slices and misfit.bound_s < best.step_s]
    if unfit:
        lacks = unfit[0].peak_bytes - unfit[0].limit_bytes
        return (
            f"{_describe_slices(unfit[0].decisions)} could be faster and lack {format_bytes(lacks)} on lane "
            f"{unfit[0].lane}"
        )
    if best.decisions.lane_count == 1:
        return "a pipeline of one lane has nothing to fill"
    return (
        f"with {_count_microbatches(best)} on {best.decisions.lane_count} lanes, sequences of {job.sequence} "
        "tokens and what "
        "every slice costs anew, no plan with slices promised to be faster"
    )


def _loss_reason(sliced: EvaluatedPlan, best: EvaluatedPlan) -> str:
    """What of the best sliced plan is longer: the work of its busiest lane, or the rest."""
    slower = sliced.step_s / best.step_s - 1
    mine, theirs = (float(plan.simulation.timeline.busy_s.max()) for plan in (sliced, best))
    words = f"the best plan found with them, {_describe_slices(sliced.decisions)}, takes {slower:.1%} longer"
    if mine - theirs > (sliced.step_s - best.step_s) / 2:
        return f"{words}: slices cost its busiest lane {format_seconds(mine - theirs)} of work more"
    return (
        f"{words}: {_count_microbatches(best)} fill{'s' * (best.decisions.microbatches == 1)} the pipeline well enough"
    )


def _count_microbatches(one: EvaluatedPlan) -> str:
    count = one.decisions.microbatches
    return f"{count} microbatch{'es' * (count > 1)}"


def _describe_slices(decisions: ParallelConfig) -> str:
    return (
        f"{len(decisions.slices)} slices of {format_slices(decisions.slices)} tokens in {describe_choices(decisions)}"
    )


def _first_plan(found: SearchResult, sliced: bool) -> EvaluatedPlan | None:
    return next((plan for plan in found.fitting if bool(plan.decisions.slices) == sliced), None)
