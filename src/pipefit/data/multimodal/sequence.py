"""The token sequence of a row: the texts of its samples, and a placeholder for every input or generated patch."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Ints
from pipefit.data.feed_arrays import IGNORE
from pipefit.data.multimodal.index import END, GENERATE, IMAGE, TEXT, SampleIndex
from pipefit.data.multimodal.sample_rows import SampleRows
from pipefit.data.rows import NO_ROW
from pipefit.model.ops.rotary import AXES

NO_SAMPLES: frozenset[int] = frozenset()
"""The empty set: no sample is left out."""


class ImageUse(NamedTuple):
    """An image at its position in a row."""

    kind: int
    "IMAGE or GENERATE."
    image: int
    "Its number in the index."
    sample: int
    place: int
    "Its number among the images of its sample."
    tokens: int


class RowSequence(NamedTuple):
    """One row, T = the sequence; positions beyond its samples are empty."""

    tokens_T: Ints
    "Ids; 0 at positions without a token."
    labels_T: Ints
    "The next token if it is to be learned, else IGNORE."
    starts_T: Ints
    "Start position of each token's sample."
    image_places: Ints
    "Positions of the input patches, in the order of the encoder; -1 for a start token without one."
    condition_places: Ints
    "Positions of the generated latent patches, in order."
    image_ends_T: Ints
    "The last position that each token sees: the end of its run of input patches, or its own."
    axis_positions_T3: Ints
    "Rotary positions on three axes, time, row and column (`axis_positions`)."


def sequence_of(index: SampleIndex, rows: SampleRows, row: int, left_out: Set[int] = NO_SAMPLES) -> RowSequence:
    """Return the arrays of one row without the samples in `left_out`; NO_ROW is an empty row."""
    sequence = rows.sequence
    tokens_T, labels_T = np.zeros(sequence, dtype=np.int64), np.full(sequence, IGNORE, dtype=np.int64)
    starts_T = np.zeros(sequence, dtype=np.int64)
    places: dict[int, list[Ints]] = {IMAGE: [np.zeros(0, np.int64)], GENERATE: [np.zeros(0, np.int64)]}
    rule = index.image_rule(IMAGE)
    dropped = {IMAGE: rule.dropped_tokens, GENERATE: 0}
    image_T, grids = np.zeros(sequence, dtype=np.bool_), dict[int, tuple[int, int]]()
    offset = 0
    for sample in samples_of(rows, row, left_out):
        begin = offset
        for kind, first, count in _sample_parts(index, sample):
            stop = offset + count - dropped.get(kind, 0)
            if kind in places:
                tokens_T[offset:stop] = _placeholder_token(index, kind)
                order = np.arange(count, dtype=np.int64)
                if kind == IMAGE:
                    size = index.images[first].tolist()[:2]
                    order = rule.token_order(*size)
                    image_T[offset:stop], grids[offset] = True, rule.patch_grid(*size)
                places[kind].append(np.where(order < 0, order, order + offset))
            else:
                tokens_T[offset:stop] = index.tokens[first : first + count]
            if kind in (TEXT, END):
                asked = max(offset, begin + 1)
                labels_T[asked - 1 : stop - 1] = tokens_T[asked:stop]
            offset = stop
        starts_T[begin:] = begin
    image_places, condition_places = (np.concatenate(places[kind]) for kind in (IMAGE, GENERATE))
    return RowSequence(
        tokens_T, labels_T, starts_T, image_places, condition_places, run_ends(image_T), axis_positions(sequence, grids)
    )


def axis_positions(sequence: int, grids: Mapping[int, tuple[int, int]]) -> Ints:
    """Return (T, 3), the positions of M-RoPE (Wang et al., 2024, section 2.1) for images of one frame.

    `grids`: first token of an image -> its rows and columns of patches, which follow each other row by row. A text
    token is one position further than the largest position before it.
    """
    positions_T3 = np.repeat(np.arange(sequence, dtype=np.int64)[:, None], AXES, axis=1)
    stop = lag = 0  # end of the last image, and how far the positions behind it lag behind their places
    for first in sorted(grids):
        positions_T3[stop:first] -= lag
        rows, columns = grids[first]
        row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
        stop = first + rows * columns
        positions_T3[first:stop] = first - lag + np.stack([np.zeros_like(row), row, column], axis=1)
        lag += rows * columns - max(rows, columns)
    positions_T3[stop:] -= lag
    return positions_T3


def run_ends(inside_T: NDArray[np.bool_]) -> Ints:
    """Return the last position of the run of true values around each one, and its own position elsewhere."""
    own_T = np.arange(len(inside_T), dtype=np.int64)
    last_T = np.where(inside_T & np.append(inside_T[1:], False), len(inside_T), own_T)
    ends: Ints = np.minimum.accumulate(last_T[::-1])[::-1]
    return ends


def images_of(
    index: SampleIndex, rows: SampleRows, row: int, kind: int, left_out: Set[int] = NO_SAMPLES
) -> list[ImageUse]:
    """Return the images of this kind in a row, in order, without the images of samples in `left_out`."""
    images = []
    for sample in samples_of(rows, row, left_out):
        pictures = [part for part in _sample_parts(index, sample) if part[0] in (IMAGE, GENERATE)]
        images += [
            ImageUse(of_kind, image, sample, position, tokens)
            for position, (of_kind, image, tokens) in enumerate(pictures)
            if of_kind == kind
        ]
    return images


def samples_of(rows: SampleRows, row: int, left_out: Set[int] = NO_SAMPLES) -> list[int]:
    """Return the index numbers of a row's samples, without the samples in `left_out`."""
    if row == NO_ROW:
        return []
    samples: list[int] = rows.samples[rows.starts[row] : rows.starts[row + 1]].tolist()
    return [sample for sample in samples if sample not in left_out] if left_out else samples


def _sample_parts(index: SampleIndex, sample: int) -> list[list[int]]:
    start, stop = index.sample_parts[sample : sample + 2]
    parts: list[list[int]] = index.parts[start:stop].tolist()
    return parts


def _placeholder_token(index: SampleIndex, kind: int) -> int:
    request = index.summary.request
    return request.image_token if kind == IMAGE else request.generation_token
