"""Images that were whole when they were indexed and are broken when they are read: what is said of them, and the step
without their samples.

What a step has must be the same on every rank, and only few ranks read an image. So those that do say what they found,
all ranks agree, and a sample with a broken image is then left out of its row, as if the manifest had not had it: its
tokens, labels, patches and latents. Its place in the order, and those of all others, stay.
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
"""What an image does that has broken since: end the run, or have its sample left out from then on."""


class BrokenImage(NamedTuple):
    """An image that was found broken."""

    sample: int
    "Its number in the index."
    name: str
    "The `id` of the sample."
    image: str
    "The file."
    reason: str


class BrokenSinceError(DataError):
    """Images are broken that were not when they were indexed, and the run was told to fail."""


def merge_broken(found: Iterable[BrokenImage]) -> list[BrokenImage]:
    """What several ranks found: every image once, in the order of samples; whoever comes first says why."""
    first: dict[tuple[int, str], BrokenImage] = {}
    for each in found:
        first.setdefault((each.sample, each.image), each)
    return [first[key] for key in sorted(first)]


def broken_since_error(found: list[BrokenImage], when: str) -> BrokenSinceError:
    """The error for images that were found when `when` was prepared."""
    others = f"; and {len(found) - 1} more" if len(found) > 1 else ""
    return BrokenSinceError(
        "An image that was whole when it was indexed is broken now.",
        where=f"{found[0].image} (sample {found[0].name}, {when})",
        seen=f"{found[0].reason}{others}",
        next_step="restore the file, or leave such samples out with --on-broken skip, and go on from the last "
        "checkpoint with --resume; pipefit data --check decode looks at every image",
    )


def remove_samples(made: StepPlan, index: SampleIndex, rows: SampleRows, left_out: Set[int]) -> StepPlan:
    """The same step without these samples (numbers in the index): counts and divisors of what is left."""
    labels = rows.count_labels(made.rows)
    counts = {space: values.copy() for space, values in made.counts.items()}
    images = {space: [*values] for space, values in made.images.items()}
    for place in find_places(rows, made.rows.tolist(), left_out):
        kept = sequence_of(index, rows, int(made.rows[place]), left_out)
        labels[place] = np.count_nonzero(kept.labels_T != IGNORE)
        counts[PATCHES][place], counts[LATENTS][place] = len(kept.image_places), len(kept.condition_places)
        for space, kind in ((PATCHES, IMAGE), (LATENTS, GENERATE)) if images else ():
            left = images_of(index, rows, int(made.rows[place]), kind, left_out)
            images[space][place] = tuple(use.tokens for use in left)
    return with_labels(replace(made, counts=counts, images=images), rows, labels)


def find_places(rows: SampleRows, chosen: Iterable[int], samples: Set[int]) -> list[int]:
    """Which of the chosen rows hold some of these samples."""
    if not samples:
        return []
    return [place for place, row in enumerate(chosen) if not samples.isdisjoint(samples_of(rows, row))]
