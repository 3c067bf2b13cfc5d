"""The arrays of one action of a multimodal model: the inputs of the stage's space, for the samples of one replica.

They are a pure function of (index, image files, step plan, space, run of positions), so any process may build them,
twice if need be, with the same bytes. Random draws (noise, time) are keyed by (seed, step, sample, image), never by the
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.data.feed_arrays import IGNORE
from pipefit.data.multimodal.broken import BrokenImage
from pipefit.data.multimodal.images import BrokenImageError, ImageSize, grid_places, read_patches
from pipefit.data.multimodal.index import GENERATE, IMAGE, SampleIndex
from pipefit.data.multimodal.manifest import printable_name
from pipefit.data.multimodal.sample_rows import LATENTS, PATCHES, SAMPLES, SampleRows
from pipefit.data.multimodal.sequence import NO_SAMPLES, ImageUse, images_of, sequence_of
from pipefit.data.permutation import make_key
from pipefit.data.stepplan import StepPlan
from pipefit.layout import Run
from pipefit.model.ops.rotary import AXES

_NOISE = 0x401_5E
"""Part of the key of noise and times."""

DECODED = {PATCHES: ("pixels",), LATENTS: ("noisy", "target")}
"""Arrays of packed spaces that need decoded images; all others follow from metadata."""

NORMAL_SCALE = 127.5
"""Generated pixels p are scaled to p / 127.5 - 1, the range of the noise."""


@dataclass(slots=True, kw_only=True)
class ModuleArrays:
    """The arrays of one action, by the input names of the model's graphs."""

    arrays: dict[str, NDArray[Any]]
    broken: tuple[BrokenImage, ...] = ()
    "Images that could not be read. They are replaced by zeros, so these arrays must not be trained on."
    image_lengths: tuple[int, ...] = ()
    "Tokens of every image of a packed row, in row order."

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """The index, its rows and the seed, from which arrays are built."""

    index: SampleIndex
    rows: SampleRows
    seed: int


def module_feed(
    source: SampleSource, plan: StepPlan, stage: int, space: str, microbatch: int, replica: int
) -> ModuleArrays:
    """Return the arrays for F of (stage, microbatch) on one replica of the stage's mesh, whose module lives in `space`.

    `run_feed` lists the arrays.
    """
    start, stop = plan.batch_run(stage, microbatch, replica)
    image_range = plan.image_run(stage, space, microbatch, replica)
    return run_feed(source, space, plan.step, plan.rows[start:stop], start, some=image_range)


def run_feed(
    source: SampleSource,
    space: str,
    step: int,
    rows: NDArray[np.int64],
    first: int,
    left_out: Set[int] = NO_SAMPLES,
    some: Run | None = None,
    decode: bool = True,
) -> ModuleArrays:
    """Return the arrays of `rows`, which occupy the positions of the batch from `first` on. B rows, T = the sequence.

    Samples in `left_out` are omitted. For a packed space, `some` selects a run of the images, and without `decode` the
    arrays in `DECODED` are omitted.

    `samples`: tokens, labels, positions (B, T); documents (B, T), the start of each token's sample; image_ends (B, T),
    the last position of each token's run of patches; axis_positions (B, T, 3), its time, row and column; rows (B,),
    their positions in the batch; image_places (1, P) and condition_places (1, L), positions b T + t of patches and of
    latents, -1 for a start token without one.

    `patches`: pixels (1, P, channels * patch**2) uint8; documents (1, P), the start of each patch's image in the packed
    row; grid (1, P, 4): row (-1: a start token, -2: an end token), column, rows, columns.

    `latents`: noisy and target (1, L, channels * patch**2) float32, time (1, L) float32, documents, grid. With x the
    pixels in [-1, 1], e the noise and t the time: noisy = (1 - t) e + t x and target = x - e (Lipman et al., 2023).

    P and L may be 0. `ModuleArrays.broken` lists the images that could not be read.
    """
    if space == SAMPLES:
        return _sample_arrays(source, step, rows, first, left_out)
    images = _images_of_rows(source, rows, IMAGE if space == PATCHES else GENERATE, left_out)
    return _PACKED[space](source, step, images if some is None else images[slice(*some)], decode)


def feed_bytes(
    rows: SampleRows,
    space: str,
    step_rows: NDArray[np.int64],
    patch_values: int,
    some: Run | None = None,
    decode: bool = True,
) -> int:
    """Return the size in bytes of `run_feed`'s arrays for these rows, from metadata alone."""
    tokens = rows.values_of(rows.counts[space], step_rows)
    if some is not None:
        tokens = np.array([*chain.from_iterable(rows.images_in(space, step_rows))][slice(*some)], dtype=np.int64)
    if space == SAMPLES:
        places = rows.values_of(rows.counts[PATCHES], step_rows) + rows.values_of(rows.counts[LATENTS], step_rows)
        return int(8 * (8 * tokens + places + 1).sum())
    grid_and_documents, time = 8 * 5, 0 if space == PATCHES else 4
    decoded = 0 if not decode else patch_values if space == PATCHES else 8 * patch_values
    return int(tokens.sum()) * (grid_and_documents + time + decoded)


def _sample_arrays(
    source: SampleSource, step: int, rows: NDArray[np.int64], first: int, left_out: Set[int]
) -> ModuleArrays:
    sequence = source.rows.sequence
    shape = (len(rows), sequence)
    tokens_BT, labels_BT = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
    documents_BT, ends_BT = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    positions_BT3 = np.zeros((*shape, AXES), dtype=np.int64)
    seen, generated = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for index, row in enumerate(rows.tolist()):
        row_sequence = sequence_of(source.index, source.rows, row, left_out)
        tokens_BT[index], labels_BT[index], documents_BT[index] = (
            row_sequence.tokens_T,
            row_sequence.labels_T,
            row_sequence.starts_T,
        )
        ends_BT[index], positions_BT3[index] = row_sequence.image_ends_T, row_sequence.axis_positions_T3
        in_row = row_sequence.image_places
        seen.append(np.where(in_row < 0, -1, in_row + index * sequence))
        generated.append(row_sequence.condition_places + index * sequence)
    return ModuleArrays(
        arrays={
            "tokens": tokens_BT,
            "labels": labels_BT,
            "positions": np.tile(np.arange(sequence, dtype=np.int64), (len(rows), 1)),
            "documents": documents_BT,
            "image_ends": ends_BT,
            "axis_positions": positions_BT3,
            "rows": np.arange(first, first + len(rows), dtype=np.int64),
            "image_places": np.concatenate(seen)[None],
            "condition_places": np.concatenate(generated)[None],
        }
    )


def _patch_arrays(source: SampleSource, step: int, images: list[ImageUse], decode: bool) -> ModuleArrays:
    if not decode:
        return _pack_images(source, images, IMAGE, [])
    pixels, broken = _read_pixels(source, images)
    result = _pack_images(source, images, IMAGE, broken)
    width = source.index.image_rule(IMAGE).patch_values
    result.arrays["pixels"] = np.concatenate([np.zeros((0, width), np.uint8), *pixels])[None]
    return result


def _latent_arrays(source: SampleSource, step: int, images: list[ImageUse], decode: bool) -> ModuleArrays:
    if not decode:
        result = _pack_images(source, images, GENERATE, [])
        times = [np.full(use.tokens, draw_noise(source.seed, step, use, 0)[0]) for use in images]
        result.arrays["time"] = np.concatenate([np.zeros(0, np.float32), *times])[None]
        return result
    pixels, broken = _read_pixels(source, images)
    result = _pack_images(source, images, GENERATE, broken)
    tokens, width = sum(use.tokens for use in images), source.index.image_rule(GENERATE).patch_values
    noisy, target = (np.empty((1, tokens, width), dtype=np.float32) for _ in range(2))
    time = np.empty((1, tokens), dtype=np.float32)
    offset = 0
    for use, of_image in zip(images, pixels, strict=True):
        here = slice(offset, offset + use.tokens)
        x = of_image.astype(np.float32) / np.float32(NORMAL_SCALE) - np.float32(1)
        t, noise = draw_noise(source.seed, step, use, width)
        noisy[0, here], target[0, here], time[0, here] = (1 - t) * noise + t * x, x - noise, t
        offset += use.tokens
    result.arrays |= {"noisy": noisy, "target": target, "time": time}
    return result


def draw_noise(seed: int, step: int, use: ImageUse, width: int) -> tuple[np.float32, NDArray[np.float32]]:
    """Return (time, uniform in [0, 1); noise (tokens, width), standard normal) of an image in a step."""
    key = make_key(_NOISE, seed, step, use.sample, use.place)
    generator = np.random.Generator(np.random.Philox(key=key))
    return np.float32(generator.random(dtype=np.float32)), generator.standard_normal(
        (use.tokens, width), dtype=np.float32
    )


def _images_of_rows(source: SampleSource, rows: NDArray[np.int64], kind: int, left_out: Set[int]) -> list[ImageUse]:
    return [use for row in rows.tolist() for use in images_of(source.index, source.rows, row, kind, left_out)]


def _pack_images(source: SampleSource, images: list[ImageUse], kind: int, broken: list[BrokenImage]) -> ModuleArrays:
    """Build documents (1, P) and grid (1, P, 4) of concatenated images."""
    documents, grids, offset = [np.zeros(0, np.int64)], [np.zeros((0, 4), np.int64)], 0
    for use in images:
        width, height, _ = source.index.images[use.image].tolist()
        grids.append(grid_places(width, height, source.index.image_rule(kind)))
        documents.append(np.full(use.tokens, offset, dtype=np.int64))
        offset += use.tokens
    return ModuleArrays(
        arrays={"documents": np.concatenate(documents)[None], "grid": np.concatenate(grids)[None]},
        image_lengths=tuple(use.tokens for use in images),
        broken=tuple(broken),
    )


def _read_pixels(source: SampleSource, images: list[ImageUse]) -> tuple[list[NDArray[np.uint8]], list[BrokenImage]]:
    """Return (tokens, channels * patch**2) of every image, with zeros for broken images, and the list of broken
    images."""
    index, pixels, broken = source.index, list[NDArray[np.uint8]](), list[BrokenImage]()
    for use in images:
        rule, path = index.image_rule(use.kind), index.image_path(use.image)
        try:
            pixels.append(read_patches(path, ImageSize(*index.images[use.image].tolist()), rule))
        except BrokenImageError as error:
            broken.append(BrokenImage(use.sample, index.sample_name(use.sample), printable_name(str(path)), str(error)))
            pixels.append(np.zeros((use.tokens, rule.patch_values), dtype=np.uint8))
    return pixels, broken


_PACKED: dict[str, Callable[[SampleSource, int, list[ImageUse], bool], ModuleArrays]] = {
    PATCHES: _patch_arrays,
    LATENTS: _latent_arrays,
}
