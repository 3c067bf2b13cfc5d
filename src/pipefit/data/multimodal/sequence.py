"""The token sequence of a row: its samples' texts, and a placeholder for every patch that is seen or generated."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.data.feed_arrays import IGNORE
from pipefit.data.multimodal.index import END, GENERATE, IMAGE, TEXT, SampleIndex
from pipefit.data.multimodal.sample_rows import SampleRows
from pipefit.data.rows import NO_ROW

Ints = NDArray[np.int64]

NONE: frozenset[int] = frozenset()
"""No sample is left out."""


class ImageUse(NamedTuple):
    """An image as a row has it."""

    kind: int
    "IMAGE or GENERATE."
    image: int
    "Its number in the index."
    sample: int
    place: int
    "Its number among the images of its sample."
    tokens: int


class RowSequence(NamedTuple):
    """One row, T = the sequence; places beyond its samples are empty."""

    tokens_T: Ints
    "Ids; 0 where there is none."
    labels_T: Ints
    "The next token where it is to be learned, else IGNORE."
    starts_T: Ints
    "Where the sample of each token starts."
    image_places: Ints
    "Where the patches that are seen stand, in their order."
    condition_places: Ints
    "Where the latent patches that are generated stand, in their order."


def sequence_of(index: SampleIndex, rows: SampleRows, row: int, left_out: Set[int] = NONE) -> RowSequence:
    """The arrays of one row without the samples that are `left_out`; NO_ROW is an empty one."""
    sequence = rows.sequence
    tokens_T, labels_T = np.zeros(sequence, dtype=np.int64), np.full(sequence, IGNORE, dtype=np.int64)
    starts_T = np.zeros(sequence, dtype=np.int64)
    places: dict[int, list[Ints]] = {IMAGE: [np.zeros(0, np.int64)], GENERATE: [np.zeros(0, np.int64)]}
    at = 0
    for sample in samples_of(rows, row, left_out):
        begin = at
        for kind, first, count in _sample_parts(index, sample):
            stop = at + count
            if kind in places:
                tokens_T[at:stop] = _placeholder_token(index, kind)
                places[kind].append(np.arange(at, stop, dtype=np.int64))
            else:
                tokens_T[at:stop] = index.tokens[first : first + count]
            if kind in (TEXT, END):
                asked = max(at, begin + 1)
                labels_T[asked - 1 : stop - 1] = tokens_T[asked:stop]
            at = stop
        starts_T[begin:] = begin
    return RowSequence(
        tokens_T, labels_T, starts_T, np.concatenate(places[IMAGE]), np.concatenate(places[GENERATE])
    )  # fmt: skip


def images_of(index: SampleIndex, rows: SampleRows, row: int, kind: int, left_out: Set[int] = NONE) -> list[ImageUse]:
    """The images of this kind in a row, in their order, without those of samples that are `left_out`."""
    found = []
    for sample in samples_of(rows, row, left_out):
        pictures = [part for part in _sample_parts(index, sample) if part[0] in (IMAGE, GENERATE)]
        found += [
            ImageUse(of_kind, image, sample, place, tokens)
            for place, (of_kind, image, tokens) in enumerate(pictures)
            if of_kind == kind
        ]
    return found


def samples_of(rows: SampleRows, row: int, left_out: Set[int] = NONE) -> list[int]:
    """The numbers, in the index, of a row's samples, without those that are `left_out`."""
    if row == NO_ROW:
        return []
    found: list[int] = rows.samples[rows.starts[row] : rows.starts[row + 1]].tolist()
    return [sample for sample in found if sample not in left_out] if left_out else found


def _sample_parts(index: SampleIndex, sample: int) -> list[list[int]]:
    start, stop = index.sample_parts[sample : sample + 2]
    found: list[list[int]] = index.parts[start:stop].tolist()
    return found


def _placeholder_token(index: SampleIndex, kind: int) -> int:
    request = index.summary.request
    return request.image_token if kind == IMAGE else request.generation_token
