"""Images that were intact when indexed and are broken when read: their report, and the step without their samples.

A step must be the same on every rank, but only a few ranks read an image. These ranks report broken images and all
ranks agree on the list. A sample with a broken image is then removed from its row, with its tokens, labels, patches and
latents, as if the manifest did not contain it. The numbering of samples in the epoch order does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from pipefit.data.feed_arrays import IGNORE
from pipefit.data.multimodal.index import GENERATE, IMAGE, SampleIndex
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES, SampleRows
from pipefit.data.multimodal.sequence import images_of, samples_of, sequence_of
from pipefit.data.multimodal.step import with_labels
from pipefit.data.stepplan import StepPlan
from pipefit.errors import DataError

OnBroken = Literal["fail", "skip"]
"""The action for an image that broke after indexing: end the run, or leave out its sample from then on."""


class BrokenImage(NamedTuple):
    """An image that could not be read."""

    sample: int
    "Its sample's number in the index."
    name: str
    "The `id` of the sample."
    image: str
    "The file."
    reason: str


class BrokenSinceError(DataError):
    """Images broke after they were indexed, and the run was configured to fail."""


def merge_broken(found: Iterable[BrokenImage]) -> list[BrokenImage]:
    """Merge the reports of several ranks: every image once, in sample order, with the first reported reason."""
    first: dict[tuple[int, str], BrokenImage] = {}
    for image in found:
        first.setdefault((image.sample, image.image), image)
    return [first[key] for key in sorted(first)]


def broken_since_error(found: list[BrokenImage], when: str) -> BrokenSinceError:
    """Build the error for images that were found broken while `when` was prepared."""
    more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
    return BrokenSinceError(
        "An image that was intact when it was indexed is broken now.",
        where=f"{found[0].image} (sample {found[0].name}, {when})",
        seen=f"{found[0].reason}{more}",
        next_step="restore the file, or leave such samples out with --on-broken skip, and go on from the last "
        "checkpoint with --resume; pipefit data --check decode looks at every image",
    )


def remove_samples(made: StepPlan, index: SampleIndex, rows: SampleRows, left_out: Set[int]) -> StepPlan:
    """Return the step without these samples (index numbers), with counts and divisors of the remaining ones."""
    labels = rows.count_labels(made.rows)
    counts = {space: values.copy() for space, values in made.counts.items()}
    images = {space: [*values] for space, values in made.images.items()}
    for position in find_places(rows, made.rows.tolist(), left_out):
        sequence = sequence_of(index, rows, int(made.rows[position]), left_out)
        labels[position] = np.count_nonzero(sequence.labels_T != IGNORE)
        counts[PATCHES][position], counts[LATENTS][position] = (
            len(sequence.image_places),
            len(sequence.condition_places),
        )
        for space, kind in ((PATCHES, IMAGE), (LATENTS, GENERATE)) if images else ():
            left = images_of(index, rows, int(made.rows[position]), kind, left_out)
            images[space][position] = tuple(use.tokens for use in left)
    return with_labels(replace(made, counts=counts, images=images), rows, labels)


def find_places(rows: SampleRows, chosen: Iterable[int], samples: Set[int]) -> list[int]:
    """Return the positions of the chosen rows that contain any of these samples."""
    if not samples:
        return []
    return [position for position, row in enumerate(chosen) if not samples.isdisjoint(samples_of(rows, row))]
