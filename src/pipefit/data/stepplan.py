"""The step plan: which rows every (stage, microbatch, replica) works on, and by what the loss is divided.

A pure function of (plan, seed, step) and the corpus's row count. Every rank computes it alone, so labels, positions
and row numbers are never sent. The rows of a step do not depend on the layout: two plans of the same job train on
the same batches, and a run resumed at step k continues with the batches that it would have had.
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
    """How a plan cuts a batch: the part of a plan that a step plan needs, computed once."""

    batch: int
    seed: int
    microbatches: int
    slices: tuple[Run, ...]
    "Token runs of the slices, together [0, sequence)."
    shares: tuple[tuple[int, ...], ...]
    "Replica shares of every stage's group."
    multiples: tuple[int, ...]
    "How many of the schedule's microbatches every stage takes together."
    divides: tuple[Divide, ...] = ()
    "What the replicas of every stage divide among them; (): samples everywhere."
    turns: tuple[tuple[int, int], ...] = ()
    "Of every stage, its turn and how many take turns; (): all take all."
    apart: bool = False
    "Whether attention keeps the documents of a row apart."
    arranging: SampleArrangement | None = None
    "How samples that differ are given to replicas and microbatches; None: they stand as they come."
    schedule: Schedule | None = field(default=None, compare=False)
    "The order of actions that microbatches are ordered for, where they are; None: 1F1B, a lane for every stage."

    @property
    def sequence_length(self) -> int:
        return self.slices[-1][1]

    def batch_run(self, stage: int, microbatch: int, replica: int) -> Run:
        """The positions within the step's batch that one replica of a stage works on in its `microbatch`.

        Row r belongs to microbatch r // rows_per_microbatch, whose rows the replicas of the stage split by their
        shares. Microbatches are counted as the stage counts them: multiples of the schedule's. The run may be empty.
        Where replicas divide images, each works on some of all rows.
        """
        rows = self.batch // self.microbatches * self.multiples[stage]
        if self.divides_images(stage):
            return microbatch * rows, (microbatch + 1) * rows
        start, stop = split_by_shares(rows, self.shares[stage])[replica]
        return microbatch * rows + start, microbatch * rows + stop

    def divides_images(self, stage: int) -> bool:
        """Whether the replicas of a stage divide the images of what it takes together, in place of the samples."""
        return bool(self.divides) and self.divides[stage] == "images"

    def stage_microbatches(self, stage: int) -> int:
        """How many microbatches the stage counts in a step."""
        return self.microbatches // self.multiples[stage]

    def own_units(self, stage: int) -> range:
        """Those of them that are the stage's own."""
        turn, turns = self.turns[stage] if self.turns else (0, 1)
        return range(turn, self.stage_microbatches(stage), turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The rows of one step. `rows[r]` is the corpus row at position r of the batch (NO_ROW: none)."""

    step: int
    rows: NDArray[np.int64]
    divisor: int
    "Valid labels of the whole step: the summed loss divided by it is the mean over tokens. At least 1."
    shape: BatchShape
    counts: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    "Space -> tokens of that space at every position of the batch; empty for text, where every row has as many."
    divisors: Mapping[str, int] = field(default_factory=dict)
    "Space -> by what the summed loss of its module is divided, where modules have losses of their own; at least 1."
    images: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    "Space -> tokens of every image at every position of the batch; empty unless a stage divides images."

    def batch_run(self, stage: int, microbatch: int, replica: int) -> Run:
        """See BatchShape.run."""
        return self.shape.batch_run(stage, microbatch, replica)

    def image_run(self, stage: int, space: str, microbatch: int, replica: int) -> Run | None:
        """Which of the images of the rows of `batch_run` are the replica's; None: all of them."""
        if not self.shape.divides_images(stage):
            return None
        start, stop = self.batch_run(stage, microbatch, replica)
        tokens = [*itertools.chain.from_iterable(self.images[space][start:stop])]
        return image_runs(tokens, self.shape.shares[stage])[replica]

    @property
    def slice_runs(self) -> tuple[Run, ...]:
        return self.shape.slices


def batch_shape(plan: Plan) -> BatchShape:
    """The cut that a plan makes. Raises PlanError where the batch, the microbatches or the slices do not divide."""
    microbatches, job = plan.order.microbatches, plan.job
    multiples = tuple(stage.microbatch_multiple for stage in plan.stages)
    for index, multiple in enumerate(multiples):
        if microbatches % multiple:
            raise PlanError(
                "The microbatches of the schedule are no multiple of what a stage takes together.",
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
    """The step plan of training step `step` (from 0). Raises DataError if the corpus does not fill one batch."""
    shape = plan if isinstance(plan, BatchShape) else batch_shape(plan)
    rows.require_batch(shape.batch)
    places = np.arange(step * shape.batch, (step + 1) * shape.batch, dtype=np.int64)
    return _plan_rows(shape, rows, step, rows.training_rows(places, shape.seed))


def evaluation_plan(plan: Plan | BatchShape, rows: RowSplit, index: int) -> StepPlan:
    """Batch `index` of an evaluation over the held-out rows, each of which comes once; the last batch may have gaps.

    `StepPlan.step` is `index`. There are `evaluation_batches` of them.
    """
    shape = plan if isinstance(plan, BatchShape) else batch_shape(plan)
    return _plan_rows(shape, rows, index, rows.held_out_rows(index * shape.batch, (index + 1) * shape.batch))


def evaluation_batches(plan: Plan | BatchShape, rows: RowSplit) -> int:
    """How many batches hold all held-out rows; 0 where nothing is held out."""
    batch = plan.batch if isinstance(plan, BatchShape) else plan.job.batch
    return -(-rows.held_out // batch)


def _plan_rows(shape: BatchShape, rows: RowSplit, step: int, chosen: NDArray[np.int64]) -> StepPlan:
    assert rows.sequence == shape.sequence_length, (
        f"rows of {rows.sequence} tokens for a plan of {shape.sequence_length}"
    )
    return StepPlan(step=step, rows=chosen, divisor=max(1, int(rows.count_labels(chosen).sum())), shape=shape)
