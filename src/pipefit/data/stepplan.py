"""The step plan: the rows of every (stage, microbatch, replica) in one step, and the divisor of the summed loss.

It is a pure function of (plan, seed, step) and the corpus's row count. Every rank computes it alone, so labels,
positions and row numbers are never sent. The rows of a step do not depend on the layout: two plans of the same job
train on the same batches. A run resumed at step k continues with the batches of the uninterrupted run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipefit.data.rows import RowSplit
from pipefit.errors import PlanError
from pipefit.layout import Run, split_by_shares
from pipefit.plan.assemble.image_split import image_runs
from pipefit.plan.types import Divide, Plan, SampleArrangement
from pipefit.schedule.actions import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The cut of a batch into microbatches, slices and replica shares, computed once from a plan."""

    batch: int
    seed: int
    microbatches: int
    slices: tuple[Run, ...]
    "Token runs of the slices, together [0, sequence)."
    shares: tuple[tuple[int, ...], ...]
    "Replica shares of every stage's mesh."
    multiples: tuple[int, ...]
    "Microbatches of the schedule that each stage processes in one call."
    divides: tuple[Divide, ...] = ()
    "The unit that the replicas of each stage divide; (): samples everywhere."
    turns: tuple[tuple[int, int], ...] = ()
    "Per stage (its turn, the number of turns), for stages that alternate; (): every stage takes all microbatches."
    apart: bool = False
    "Whether attention is masked between the documents of a row."
    arranging: SampleArrangement | None = None
    "Assignment of unequal samples to replicas and microbatches; None: samples keep their order."
    schedule: Schedule | None = field(default=None, compare=False)
    "The schedule that microbatches are reordered for, if any; None: 1F1B with one lane per stage."

    @property
    def sequence_length(self) -> int:
        return self.slices[-1][1]

    def batch_run(self, stage: int, microbatch: int, replica: int) -> Run:
        """Return the positions within the step's batch that one replica of a stage works on in its `microbatch`.

        Row r belongs to microbatch r // rows_per_microbatch. The replicas of the stage split these rows by their
        shares. Microbatches are counted in the stage's unit, a multiple of the schedule's. The run may be empty.
        Replicas that divide images each get all rows.
        """
        rows = self.batch // self.microbatches * self.multiples[stage]
        if self.divides_images(stage):
            return microbatch * rows, (microbatch + 1) * rows
        start, stop = split_by_shares(rows, self.shares[stage])[replica]
        return microbatch * rows + start, microbatch * rows + stop

    def divides_images(self, stage: int) -> bool:
        """Return whether the replicas of a stage divide the images of a microbatch rather than its samples."""
        return bool(self.divides) and self.divides[stage] == "images"

    def stage_microbatches(self, stage: int) -> int:
        """Return the number of microbatches of a stage in a step."""
        return self.microbatches // self.multiples[stage]

    def own_units(self, stage: int) -> range:
        """Return the microbatches that are the stage's own if stages take turns, else all."""
        turn, turns = self.turns[stage] if self.turns else (0, 1)
        return range(turn, self.stage_microbatches(stage), turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The rows of one step. `rows[r]` is the corpus row at position r of the batch (NO_ROW: none)."""

    step: int
    rows: NDArray[np.int64]
    divisor: int
    "Valid labels of the whole step, at least 1. The summed loss divided by it is the mean over tokens."
    shape: BatchShape
    counts: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    "Space -> tokens of that space at every position of the batch; empty for text, whose rows are all of equal length."
    divisors: Mapping[str, int] = field(default_factory=dict)
    "Space -> divisor of its module's summed loss, for modules with their own loss; at least 1."
    images: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    "Space -> tokens of every image at every position of the batch; empty unless a stage divides images."

    def batch_run(self, stage: int, microbatch: int, replica: int) -> Run:
        """See `BatchShape.batch_run`."""
        return self.shape.batch_run(stage, microbatch, replica)

    def image_run(self, stage: int, space: str, microbatch: int, replica: int) -> Run | None:
        """Return the replica's run of the images in the rows of `batch_run`; None: all of them."""
        if not self.shape.divides_images(stage):
            return None
        start, stop = self.batch_run(stage, microbatch, replica)
        tokens = [*itertools.chain.from_iterable(self.images[space][start:stop])]
        return image_runs(tokens, self.shape.shares[stage])[replica]

    @property
    def slice_runs(self) -> tuple[Run, ...]:
        return self.shape.slices


def batch_shape(plan: Plan) -> BatchShape:
    """Return the cut of a plan's batch. Raises PlanError if the batch, the microbatches or the slices do not divide
    evenly."""
    microbatches, job = plan.order.microbatches, plan.job
    multiples = tuple(stage.microbatch_multiple for stage in plan.stages)
    for index, multiple in enumerate(multiples):
        if microbatches % multiple:
            raise PlanError(
                "The number of microbatches is not a multiple of the stage's microbatches per call.",
                where=f"stages[{index}].microbatch_multiple",
                seen=f"{multiple} of {microbatches}",
            )
    if job.batch % microbatches:
        raise PlanError(
            "The batch cannot be cut into equal microbatches.",
            where="job.batch",
            seen=f"{job.batch} rows in {microbatches} microbatches",
            next_step="choose a number of microbatches that divides the batch",
        )
    if sum(plan.order.slices) != job.sequence or min(plan.order.slices, default=0) < 1:
        raise PlanError(
            "The slices do not add up to the sequence.",
            where="order.slices",
            seen=f"{list(plan.order.slices)} for {job.sequence} tokens",
        )
    stops = list(itertools.accumulate(plan.order.slices))
    groups = [plan.groups[stage.group].to_mesh() for stage in plan.stages]
    return BatchShape(
        batch=job.batch,
        seed=job.seed,
        microbatches=microbatches,
        slices=tuple(zip([0, *stops[:-1]], stops, strict=True)),
        shares=tuple(group.find_axis("replica").shares for group in groups),
        multiples=multiples,
        divides=tuple(stage.divide for stage in plan.stages),
        turns=tuple((stage.turn, stage.turns) for stage in plan.stages),
        apart=job.documents == "apart",
        arranging=plan.arranging,
        schedule=plan.to_schedule() if plan.arranging is not None and plan.arranging.order else None,
    )


def step_plan(plan: Plan | BatchShape, rows: RowSplit, step: int) -> StepPlan:
    """Return the step plan of training step `step` (from 0). Raises DataError if the corpus does not fill one batch."""
    shape = plan if isinstance(plan, BatchShape) else batch_shape(plan)
    rows.require_batch(shape.batch)
    places = np.arange(step * shape.batch, (step + 1) * shape.batch, dtype=np.int64)
    return _plan_rows(shape, rows, step, rows.training_rows(places, shape.seed))


def evaluation_plan(plan: Plan | BatchShape, rows: RowSplit, index: int) -> StepPlan:
    """Return batch `index` of an evaluation over the held-out rows, each of which comes once; the last batch may have
    gaps.

    `StepPlan.step` is `index`. `evaluation_batches` gives the number of batches.
    """
    shape = plan if isinstance(plan, BatchShape) else batch_shape(plan)
    return _plan_rows(shape, rows, index, rows.held_out_rows(index * shape.batch, (index + 1) * shape.batch))


def evaluation_batches(plan: Plan | BatchShape, rows: RowSplit) -> int:
    """Return the number of batches that cover all held-out rows; 0 if no rows are held out."""
    batch = plan.batch if isinstance(plan, BatchShape) else plan.job.batch
    return -(-rows.held_out // batch)


def _plan_rows(shape: BatchShape, rows: RowSplit, step: int, chosen: NDArray[np.int64]) -> StepPlan:
    assert rows.sequence == shape.sequence_length, (
        f"rows of {rows.sequence} tokens for a plan of {shape.sequence_length}"
    )
    return StepPlan(step=step, rows=chosen, divisor=max(1, int(rows.count_labels(chosen).sum())), shape=shape)
