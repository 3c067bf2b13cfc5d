"""Data for the planner: global batches as a run would draw them, and the assignment of their samples.

The planner does not import this package; its caller passes these functions in. So the planner simulates the arrangement
of the run with the same code that arranges the run.
"""

from __future__ import annotations

import numpy as np

from pipefit.cost.types import Ints
from pipefit.data.multimodal.arrange import arrange_rows
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES, SAMPLES, SampleRows
from pipefit.data.stepplan import BatchShape
from pipefit.plan.request.sampled_batches import AllStageShares, SampledBatches
from pipefit.plan.types import SampleArrangement
from pipefit.schedule.actions import Schedule


def sample_batches(rows: SampleRows, batch: int, batches: int, seed: int = 0, where: str = "data") -> SampledBatches:
    """Return the first `batches` global batches of a run with this seed. Raises DataError if the rows do not fill
    one."""
    rows.require_batch(batch, where)
    chosen = rows.training_rows(np.arange(batch * batches, dtype=np.int64), seed).reshape(batches, batch)
    spaces = [space for space in (PATCHES, LATENTS) if rows.counts[space].any()]
    return SampledBatches(
        tokens={space: rows.values_of(rows.counts[space], chosen) for space in spaces},
        squares={space: rows.values_of(rows.squares[space], chosen) for space in spaces},
        images={
            space: [rows.images_in(space, batch_rows) for batch_rows in chosen] for space in spaces if rows.image_tokens
        },
        note=f"samples: {batches} global batches of {where}",
    )


def arranged_samples(
    samples: SampledBatches,
    batch: int,
    arranging: SampleArrangement,
    shares: AllStageShares,
    count: int,
    schedule: Schedule | None = None,
) -> Ints:
    """Return, for every position of the batch, the sample placed there
    (`pipefit.plan.request.sampled_batches.Arrange`).

    The arrangement is the run's for stages with these shares and this schedule (None: 1F1B, one lane per stage).
    """
    size = next((table.shape[1] for table in samples.tokens.values()), 0)
    shape = BatchShape(
        batch=size,
        seed=0,
        microbatches=count,
        slices=((0, 1),),
        shares=tuple(stage_shares.replicas for stage_shares in shares),
        multiples=tuple(stage_shares.multiple for stage_shares in shares),
        divides=tuple(stage_shares.divide for stage_shares in shares),
        arranging=arranging,
        schedule=schedule,
    )
    return arrange_rows(shape, rows_of_samples(samples, batch), np.arange(size, dtype=np.int64))


def rows_of_samples(samples: SampledBatches, batch: int) -> SampleRows:
    """Return the samples of one batch as rows by number."""
    size = next((table.shape[1] for table in samples.tokens.values()), 0)
    zeros = np.zeros(size, dtype=np.int64)
    spaces = {SAMPLES, PATCHES, LATENTS, *samples.tokens}
    return SampleRows(
        count=size,
        sequence=1,
        last_labels=1,
        held_out=0,
        samples=np.arange(size, dtype=np.int64),
        starts=np.arange(size + 1, dtype=np.int64),
        counts={space: samples.tokens[space][batch] if space in samples.tokens else zeros for space in spaces},
        squares={space: samples.squares[space][batch] if space in samples.squares else zeros for space in spaces},
        images=zeros,
        label_counts=zeros,
        latent_values=1,
        too_long=0,
    )
