"""What a planner needs of data: global batches as a run would draw them, and who takes which of their samples.

The planner stands above this room and is handed these by whoever calls it, so that what it simulates is arranged by
the very code that arranges the run.
"""

from __future__ import annotations

import numpy as np

from pipefit.data.multimodal.arrange import arrange_rows
from pipefit.data.multimodal.loads import Ints
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES, SAMPLES, SampleRows
from pipefit.data.stepplan import BatchShape
from pipefit.plan.request.sampled_batches import SampledBatches, Shares
from pipefit.plan.types import SampleArrangement
from pipefit.schedule.actions import Schedule


def sample_batches(rows: SampleRows, batch: int, batches: int, seed: int = 0, where: str = "data") -> SampledBatches:
    """The first `batches` global batches of a run with this seed. Raises DataError if the rows do not fill one."""
    rows.require_batch(batch, where)
    chosen = rows.training_rows(np.arange(batch * batches, dtype=np.int64), seed).reshape(batches, batch)
    spaces = [space for space in (PATCHES, LATENTS) if rows.counts[space].any()]
    return SampledBatches(
        tokens={space: rows.values_of(rows.counts[space], chosen) for space in spaces},
        squares={space: rows.values_of(rows.squares[space], chosen) for space in spaces},
        images={space: [rows.images_in(space, each) for each in chosen] for space in spaces if rows.image_tokens},
        note=f"samples: {batches} global batches of {where}",
    )


def arranged_samples(
    samples: SampledBatches,
    batch: int,
    arranging: SampleArrangement,
    shares: Shares,
    count: int,
    schedule: Schedule | None = None,
) -> Ints:
    """For every position of the batch, which of its samples stands there (see
    `pipefit.plan.request.sampled_batches.Arrange`): as a run arranges it whose stages have these shares, with this
    order of actions (None: 1F1B, a lane a stage)."""
    size = next((table.shape[1] for table in samples.tokens.values()), 0)
    shape = BatchShape(
        batch=size,
        seed=0,
        microbatches=count,
        slices=((0, 1),),
        shares=tuple(own.replicas for own in shares),
        multiples=tuple(own.multiple for own in shares),
        divides=tuple(own.divide for own in shares),
        arranging=arranging,
        schedule=schedule,
    )
    return arrange_rows(shape, rows_of_samples(samples, batch), np.arange(size, dtype=np.int64))


def rows_of_samples(samples: SampledBatches, batch: int) -> SampleRows:
    """The samples of one batch as rows by number."""
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
