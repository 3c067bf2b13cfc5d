"""Our joint plan for one of TeraPipe's settings: the planner, with the layout fixed and everything else free.

Replicas, stages' lanes, shards and the even cut of the layers are the published ones. Microbatches, slices, schedule
and recomputation are the planner's choice, within the memory that is asked for: that of a V100, and where TeraPipe
slices, no more activations than max(1/2, (s + K - 1) / (m s)) of its own, with its s slices and m microbatches. That
bound is what slice-1F1B holds on the first stage, and half of everything where there are few microbatches.
"""

from __future__ import annotations

from benchmarks.token_slices.replay import Ran, job_of, planner_context, ran
from benchmarks.token_slices.v100 import Constants, Setting, reduction_s
from pipefit.errors import PipefitError
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.passes.reslice import reslice_best
from pipefit.plan.passes.search import search_plans
from pipefit.plan.request.constraints import Constraints

MEMORY_BYTES = 16e9
TURNS = (1, 2)
"""Stages a lane that are tried, where the layers allow it."""


def allowed_share(row: Setting, theirs: Ran) -> float:
    """Of TeraPipe's activations; 1 where it does not slice."""
    slices, microbatches = max(1, len(theirs.slices)), row.sequences // theirs.rows
    if slices == 1:
        return 1.0
    return min(1.0, max(0.5, (slices + row.stages - 1) / (microbatches * slices)))


def joint(row: Setting, constants: Constants, theirs: Ran) -> Ran:
    """The fastest plan that the planner finds. Raises PipefitError where none fits."""
    stays = theirs.peak_bytes - theirs.activations_bytes
    limit = min(MEMORY_BYTES, stays + allowed_share(row, theirs) * theirs.activations_bytes)
    found: list[EvaluatedPlan] = []
    errors: list[PipefitError] = []
    for turns in TURNS:
        if row.layers_per_stage % turns:
            continue
        context, fixed = planner_context(row, constants, turns, limit), published_constraints(row, turns)
        try:
            found += reslice_best(
                context, job_of(row), fixed, search_plans(context, job_of(row), fixed, top=1)
            ).fitting[:1]
        except PipefitError as error:
            errors.append(error)
    if not found and errors:
        raise errors[0]
    return as_ran(row, constants, min(found, key=lambda one: one.step_s))


def published_constraints(row: Setting, turns: int) -> Constraints:
    """The published layout."""
    stages = row.stages * turns
    each = row.layers // stages
    return Constraints(
        replicas=(1,) * row.replicas,
        stages=stages,
        shards=(1,) * row.shards,
        sharding="megatron" if row.shards > 1 else None,
        inner="stage",
        sharded_state="none",
        cuts=tuple(1 + each * index for index in range(1, stages)),
        devices=row.replicas * row.stages * row.shards,
        mapping="hostname",
    )


def as_ran(row: Setting, constants: Constants, one: EvaluatedPlan) -> Ran:
    """What a plan takes and holds."""
    decisions, simulation = one.decisions, one.simulation
    rows = row.sequences // decisions.microbatches
    static = simulation.costs.static_bytes
    return ran(decisions.schedule, rows, decisions.slices, simulation.timeline, static, reduction_s(row, constants))
