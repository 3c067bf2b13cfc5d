"""TeraPipe's joint cut of the batch and of the sequences: a knapsack over parts of the batch (Li et al. 2021, arXiv
2102.07988, section 3.4).

A step's sequences are divided into parts of b rows. Every part is one microbatch with its own slices, and all slices of
all parts flow through the pipeline one after another. For a bound on the longest slice, the least sum of a part of b
rows is TeraPipe's shortest path, and the least sum of B rows is a knapsack over parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.plan.slicing.bounds import NO_BOUND, BoundedSlicing, best_bound
from pipefit.plan.slicing.cuts import TimeOf
from pipefit.plan.slicing.terapipe import SlicePaths


@dataclass(frozen=True, slots=True)
class SlicedMicrobatch:
    """One microbatch."""

    rows: int
    slices: tuple[int, ...]
    "Tokens; equal for all parts with this number of rows."


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedBatch:
    """A step's microbatches, in descending order of rows."""

    parts: tuple[SlicedMicrobatch, ...]
    total_s: float
    longest_s: float
    step_s: float


def best_batch(
    length: int,
    rows: int,
    stages: float,
    time_of: Callable[[int], TimeOf],
    *,
    multiple: int = 8,
    sizes: Sequence[int] = (),
    eps_s: float = 0.0,
    compiled: bool | None = None,
) -> SlicedBatch:
    """Return the parts of `rows` sequences of `length` tokens, and their slices, with the least total time.

    `time_of(b)` is the time of slices of b rows. Parts have one of `sizes` rows, some of which must add up to `rows`,
    or any number. O(sizes x cells^2 + rows x sizes) for a bound. `eps_s`: see `best_bound`.
    """
    unit = math.gcd(*sizes) if sizes else 1
    paths = {size: SlicePaths(length, time_of(size), multiple, compiled) for size in sizes or range(1, rows + 1)}

    def pack_within(bound_s: float) -> tuple[BoundedSlicing, tuple[int, ...]]:
        return _pack_rows(rows // unit, {size // unit: path.solve_within(bound_s) for size, path in paths.items()})

    def slice_within(bound_s: float) -> BoundedSlicing:
        return pack_within(bound_s)[0]

    candidates = np.unique(np.concatenate([path.candidates for path in paths.values()])).tolist()
    bound_s, bounded = best_bound(candidates, slice_within, stages, eps_s)
    chosen = sorted((unit * size for size in pack_within(bound_s)[1]), reverse=True)
    slices = {size: paths[size].slices_within(bound_s) for size in set(chosen)}
    return SlicedBatch(
        parts=tuple(SlicedMicrobatch(size, slices[size]) for size in chosen),
        total_s=bounded.total_s,
        longest_s=bounded.longest_s,
        step_s=bounded.step_s(stages),
    )


def _pack_rows(rows: int, found: dict[int, BoundedSlicing]) -> tuple[BoundedSlicing, tuple[int, ...]]:
    """Return (the least sum of parts with `rows` rows in total, the rows of the parts)."""
    best: list[tuple[float, int]] = [(0.0, 0)]
    for count in range(1, rows + 1):
        options = ((best[count - size][0] + part.total_s, size) for size, part in found.items() if size <= count)
        best.append(min(options, default=(NO_BOUND, 0)))
    if best[rows][0] == NO_BOUND:
        return BoundedSlicing(NO_BOUND, NO_BOUND), ()
    parts: list[int] = []
    while sum(parts) < rows:
        parts.append(best[rows - sum(parts)][1])
    return BoundedSlicing(best[rows][0], max(found[size].longest_s for size in parts)), tuple(parts)
