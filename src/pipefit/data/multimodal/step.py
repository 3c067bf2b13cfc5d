"""The step of a multimodal run: which samples it has, in which order, and how many tokens of each space.

The samples of a step are a function of (index, seed, step); their order within the batch, which says who takes which,
of that and the plan. `arrange_rows` permutes: the samples of a batch stay what they are, under any plan.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipefit.data.multimodal.arrange import arrange_rows
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES, SAMPLES, Ints, SampleRows
from pipefit.data.stepplan import BatchShape, StepPlan, evaluation_plan, step_plan
from pipefit.plan.types import Plan


def multimodal_step(plan: Plan | BatchShape, rows: SampleRows, step: int) -> StepPlan:
    """The step plan of training step `step` (from 0), its samples balanced and ordered as the plan says.

    `counts[space][r]` are the tokens of position r, `images[space][r]` those of its images where stages divide images;
    `divisors` say by what each module's summed loss is divided.
    Raises DataError if the samples do not fill one batch.
    """
    made = step_plan(plan, rows, step)
    return count_step(replace(made, rows=made.rows[arrange_rows(made.shape, rows, made.rows)]), rows)


def multimodal_evaluation(plan: Plan | BatchShape, rows: SampleRows, index: int) -> StepPlan:
    """Batch `index` of an evaluation over the held-out rows; see `evaluation_plan`."""
    return count_step(evaluation_plan(plan, rows, index), rows)


def count_step(made: StepPlan, rows: SampleRows) -> StepPlan:
    """The same step with its counts and divisors."""
    counts = {space: rows.values_of(values, made.rows) for space, values in rows.counts.items()}
    counts[SAMPLES] = np.full(len(made.rows), rows.sequence, dtype=np.int64)
    images = (
        {space: rows.images_in(space, made.rows) for space in (PATCHES, LATENTS)}
        if "images" in made.shape.divides
        else {}
    )
    return with_labels(replace(made, counts=counts, images=images), rows, rows.count_labels(made.rows))


def with_labels(made: StepPlan, rows: SampleRows, labels: Ints) -> StepPlan:
    """The same step, whose rows have so many `count_labels` (batch,), with the divisors of its counts."""
    divisor = max(1, int(labels.sum()))
    latents = int(np.sum(made.counts[LATENTS]))
    divisors = {SAMPLES: divisor, LATENTS: max(1, latents * rows.latent_values)}
    return replace(made, divisor=divisor, divisors=divisors)
