"""One step of a multimodal run: its samples, their order, and the tokens of each space.

The samples of a step are a function of (index, seed, step). Their order within the batch, which decides the replica and
the microbatch of each sample, also depends on the plan. `arrange_rows` only permutes: a batch has the same samples
under any plan.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipefit.cost.types import Ints
from pipefit.data.multimodal.arrange import arrange_rows
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES, SAMPLES, SampleRows
from pipefit.data.stepplan import BatchShape, StepPlan, evaluation_plan, step_plan
from pipefit.plan.types import Plan


def multimodal_step(plan: Plan | BatchShape, rows: SampleRows, step: int) -> StepPlan:
    """Return the step plan of training step `step` (from 0), its samples balanced and ordered as the plan says.

    `counts[space][r]` is the number of tokens at position r, and `images[space][r]` the tokens of each of its images,
    if stages divide images. `divisors` are the divisors of each module's summed loss. Raises DataError if the samples
    do not fill one batch.
    """
    base_plan = step_plan(plan, rows, step)
    return count_step(
        replace(base_plan, rows=base_plan.rows[arrange_rows(base_plan.shape, rows, base_plan.rows)]), rows
    )


def multimodal_evaluation(plan: Plan | BatchShape, rows: SampleRows, index: int) -> StepPlan:
    """Return batch `index` of an evaluation over the held-out rows; see `evaluation_plan`."""
    return count_step(evaluation_plan(plan, rows, index), rows)


def count_step(made: StepPlan, rows: SampleRows) -> StepPlan:
    """Return the step with its counts and divisors."""
    counts = {space: rows.values_of(values, made.rows) for space, values in rows.counts.items()}
    counts[SAMPLES] = np.full(len(made.rows), rows.sequence, dtype=np.int64)
    images = (
        {space: rows.images_in(space, made.rows) for space in (PATCHES, LATENTS)}
        if "images" in made.shape.divides
        else {}
    )
    return with_labels(replace(made, counts=counts, images=images), rows, rows.count_labels(made.rows))


def with_labels(made: StepPlan, rows: SampleRows, labels: Ints) -> StepPlan:
    """Return the step with the divisors of its counts; `labels` (batch,) is the number of valid labels of each row."""
    divisor = max(1, int(labels.sum()))
    latents = int(np.sum(made.counts[LATENTS]))
    divisors = {SAMPLES: divisor, LATENTS: max(1, latents * rows.latent_values)}
    return replace(made, divisor=divisor, divisors=divisors)
