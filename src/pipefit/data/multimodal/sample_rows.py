"""The rows of an index: the samples of each row, its tokens in each space, and its labels.

All of it comes from metadata, by sums over the index's parts; no text or image is read. A row holds one sample or, if
packed, consecutive samples of the manifest until the row is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pipefit.cost.types import Ints
from pipefit.data.multimodal.index import END, GENERATE, IMAGE, TEXT, SampleIndex
from pipefit.data.rows import NO_ROW, RowSplit, check_held_out
from pipefit.errors import DataError

SAMPLES, PATCHES, LATENTS = "samples", "patches", "latents"
"""The spaces of a multimodal model: token sequences, patches of input images, latent patches of generated images."""

OnLong = Literal["fail", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRows(RowSplit):
    """Rows by number, with the metadata of each."""

    samples: Ints
    "The samples that are trained on, in manifest order."
    starts: Ints
    "(count + 1,): row r holds `samples[starts[r]:starts[r + 1]]`."
    counts: Mapping[str, Ints]
    "Space -> (count,) tokens of every row. For `samples` it is the full sequence, which is computed including padding."
    squares: Mapping[str, Ints]
    "Space -> (count,) sum over the row's images of their squared tokens: the cost of attention within images."
    images: Ints
    "(count,) images of every row, input or generated."
    label_counts: Ints
    "(count,) valid labels of every row."
    latent_values: int
    "Values of one latent token."
    image_tokens: Mapping[str, tuple[Ints, Ints]] = field(default_factory=dict)
    "Packed space -> (tokens of every image of all rows, (count + 1,) start of each row's images); {}: not known."
    too_long: int
    "Samples that were left out because they are longer than the sequence."

    def count_labels(self, rows: Ints) -> Ints:
        """See `RowSplit.count_labels`."""
        return self.values_of(self.label_counts, rows)

    def values_of(self, values: Ints, rows: Ints) -> Ints:
        """Return the values of these rows; 0 for NO_ROW."""
        return np.where(rows == NO_ROW, 0, values[np.maximum(rows, 0)]).astype(np.int64)

    def images_in(self, space: str, rows: Ints) -> list[tuple[int, ...]]:
        """Return the tokens of every image of a packed space in each of these rows."""
        tokens, starts = self.image_tokens[space]
        return [() if row == NO_ROW else tuple(tokens[starts[row] : starts[row + 1]].tolist()) for row in rows.tolist()]


def rows_of_index(
    index: SampleIndex,
    sequence: int,
    *,
    batch: int = 1,
    held_out: float = 0,
    pack: bool = False,
    on_long: OnLong = "fail",
    images: bool = False,
) -> SampleRows:
    """Cut the samples of an index into rows of `sequence` tokens.

    `held_out`: a fraction below 1, rounded to whole batches of `batch` rows, or a number of rows. `pack`: fill each row
    with several samples. `images`: also record the tokens of every image.

    Raises DataError for a sample that is longer than the sequence, unless `on_long` is `skip`, and if no rows are left
    for training.
    """
    per_sample = _SampleCounts(index)
    fits = per_sample.lengths <= sequence
    if not fits.all() and on_long == "fail":
        raise _too_long_error(index, per_sample.lengths, sequence)
    samples = np.flatnonzero(fits)
    starts = (
        _packed_starts(per_sample.lengths[samples], sequence) if pack else np.arange(len(samples) + 1, dtype=np.int64)
    )
    count = len(starts) - 1
    held_out_count = _held_out_count(count, batch, held_out, str(index.folder))

    def by_row(values: Ints) -> Ints:
        return _run_sums(values[samples], starts)

    return SampleRows(
        count=count,
        sequence=sequence,
        last_labels=sequence,
        held_out=held_out_count,
        samples=samples,
        starts=starts,
        counts={
            SAMPLES: np.full(count, sequence, dtype=np.int64),
            PATCHES: by_row(per_sample.tokens[IMAGE]),
            LATENTS: by_row(per_sample.tokens[GENERATE]),
        },
        squares={
            SAMPLES: np.full(count, sequence**2, dtype=np.int64),
            PATCHES: by_row(per_sample.squares[IMAGE]),
            LATENTS: by_row(per_sample.squares[GENERATE]),
        },
        images=by_row(per_sample.images),
        label_counts=by_row(per_sample.labels),
        latent_values=index.image_rule(GENERATE).patch_values,
        image_tokens={
            space: (per_sample.image_tokens(kind, samples), _run_starts(by_row(per_sample.images_of[kind])))
            for space, kind in (((PATCHES, IMAGE), (LATENTS, GENERATE)) if images else ())
        },
        too_long=int((~fits).sum()),
    )


def lengths_of(index: SampleIndex) -> Ints:
    """Return (samples,) tokens of every sample in its sequence, including those of images."""
    return _SampleCounts(index).lengths


class _SampleCounts:
    """Sums over the parts of every sample, (samples,) each."""

    def __init__(self, index: SampleIndex) -> None:
        starts = np.asarray(index.sample_parts)
        kinds, _, tokens = np.asarray(index.parts).T
        dropped = index.image_rule(IMAGE).dropped_tokens
        self.lengths = _run_sums(tokens - dropped * (kinds == IMAGE), starts)
        self.tokens = {kind: _run_sums(np.where(kinds == kind, tokens, 0), starts) for kind in (IMAGE, GENERATE)}
        self.squares = {kind: _run_sums(np.where(kinds == kind, tokens**2, 0), starts) for kind in (IMAGE, GENERATE)}
        self.images_of = {kind: _run_sums((kinds == kind).astype(np.int64), starts) for kind in (IMAGE, GENERATE)}
        self.images = self.images_of[IMAGE] + self.images_of[GENERATE]
        self._parts = starts, kinds, tokens
        learned = np.where((kinds == TEXT) | (kinds == END), tokens, 0)
        # The first token of a sample is never a label.
        first = np.append(learned, 0)[starts[:-1]] > 0
        self.labels = _run_sums(learned, starts) - (first & (starts[:-1] < starts[1:]))

    def image_tokens(self, kind: int, samples: Ints) -> Ints:
        """Return the tokens of every image of a kind in these samples, which are in ascending order."""
        starts, kinds, tokens = self._parts
        wanted = np.zeros(len(starts) - 1, dtype=np.bool_)
        wanted[samples] = True
        selected: Ints = tokens[(kinds == kind) & np.repeat(wanted, np.diff(starts))].astype(np.int64)
        return selected


def _run_starts(counts: Ints) -> Ints:
    """Return the cumulative sums before each entry, and the total."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _run_sums(values: Ints, starts: Ints) -> Ints:
    """Return the sum over every run [starts[i], starts[i + 1])."""
    total = _run_starts(values)
    sums: Ints = total[starts[1:]] - total[starts[:-1]]
    return sums


def _packed_starts(lengths: Ints, sequence: int) -> Ints:
    """Return the first sample of each row, if each row takes consecutive samples until it is full."""
    ends = np.cumsum(lengths)
    starts = [0]
    while starts[-1] < len(lengths):
        before = ends[starts[-1]] - lengths[starts[-1]]
        starts.append(int(np.searchsorted(ends, before + sequence, side="right")))
    return np.array(starts, dtype=np.int64)


def _held_out_count(count: int, batch: int, held_out: float, where: str) -> int:
    check_held_out(held_out, "--held-out")
    held_out_rows = int(held_out) if held_out >= 1 else int(count * held_out) // batch * batch
    if held_out_rows >= count:
        raise DataError(
            "There is no sample left to train on.",
            where=where,
            seen=f"{count} rows, {held_out_rows} of them held out",
            next_step="give more samples or a longer sequence, or hold out fewer rows",
        )
    return held_out_rows


def _too_long_error(index: SampleIndex, lengths: Ints, sequence: int) -> DataError:
    long = np.flatnonzero(lengths > sequence)
    first = int(long[0])
    return DataError(
        "A sample is longer than the sequence.",
        where=f"{index.folder}, sample {index.sample_name(first)}",
        seen=f"{lengths[first]} tokens, images among them, for a sequence of {sequence}; "
        f"{len(long)} of {len(lengths)} samples are too long, the longest has {lengths.max()}",
        allowed=f"at most {sequence} tokens",
        next_step="plan a longer sequence, index with fewer patches an image, or leave them out: --on-long skip",
    )
