"""Slicings with a set number of slices: of equal length, or of equal cost.

Later slices attend to more keys, so slices of equal cost get shorter towards the end (Li et al. 2021, arXiv 2102.07988,
section 3.3; Sun et al. 2024, arXiv 2406.03488, section 3.3, for FLOPs). Lengths are multiples of the sizes preferred by
kernels and shards; the remainder of the sequence lengthens the last slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from pipefit.cost.types import Array, Ints
from pipefit.errors import PlanError

TimeOf = Callable[[Ints, Ints], Array]
"""(tokens of slices, tokens before them) -> seconds of each; arrays of one shape. It grows with the tokens. Of two
slices that end at the same token, the shorter one costs no more."""

CLOSE = 1e-7
"""Relative difference at which bounds on the most expensive slice are treated as equal."""

LIMIT_ROUNDING = 1 + 1e-12


def vectorize_times(time_of: Callable[[int, int], float]) -> TimeOf:
    """Return a function of arrays from a function of one slice."""

    def times_of_arrays(tokens: Ints, past: Ints) -> Array:
        pairs = zip(tokens.tolist(), past.tolist(), strict=True)
        return np.array([time_of(length, before) for length, before in pairs], dtype=np.float64)

    return times_of_arrays


def slice_grain(*sizes: int) -> int:
    """Return the smallest unit of slice lengths in tokens: a common multiple of a kernel's tile, the shards, and so
    on."""
    return math.lcm(*sizes)


def most_slices(length: int, multiple: int = 1) -> int:
    """Return the largest number of slices of at least `multiple` tokens in a sequence of `length` tokens."""
    return max(1, length // multiple)


def past_of(slices: Sequence[int]) -> Ints:
    """Return the tokens before each slice."""
    return np.concatenate([[0], np.cumsum(slices)[:-1]]).astype(np.int64)


def places_of(length: int, multiple: int = 1) -> Ints:
    """Return the tokens at which slices may begin and end: multiples, with the last one moved to the end of the
    sequence."""
    places = np.arange(most_slices(length, multiple) + 1, dtype=np.int64) * multiple
    places[-1] = length
    return places


def slice_times(slices: Sequence[int], time_of: TimeOf) -> Array:
    """Return the seconds of each slice."""
    return time_of(np.asarray(slices, dtype=np.int64), past_of(slices))


def uniform_slices(length: int, slices: int, multiple: int = 1) -> tuple[int, ...]:
    """Return slices of equal length up to rounding to `multiple`; the longer ones come first.

    Raises PlanError if the sequence is too short for this many.
    """
    check_number(length, slices, multiple)
    places = places_of(length, multiple)
    cells = len(places) - 1
    stops = [-(-cells * i // slices) for i in range(slices + 1)]
    return tuple(int(size) for size in np.diff(places[stops]))


def equal_cost(length: int, slices: int, time_of: TimeOf, multiple: int = 1) -> tuple[int, ...]:
    """Return the slicing that minimises the cost of the most expensive slice, with costs as equal as `multiple` allows.
    If short slices cost as much as long ones, the slices have equal lengths.

    The minimal bound is found by bisection: slices that are as long as the bound allows reach furthest. The slack
    between the boundaries reached from the start and from the end is spread evenly, in cost or in tokens, whichever
    takes less. This requires that a slice costs no less than a later-starting slice with the same end. A long past can
    violate this where short slices cost almost as much as long ones; the result is then only no worse than even slices.
    Raises PlanError if the sequence is too short for this many slices.
    """
    return SliceCutter(length, time_of, multiple).equal_cost(slices)


def _round_digits(number: float) -> float:
    """Return the number to nine digits, so that sums of the same terms in any order are equal."""
    return float(f"{number:.9g}")


def check_number(length: int, slices: int, multiple: int, where: str = "the number of slices") -> None:
    """Raise PlanError if this many slices of at least `multiple` tokens are impossible."""
    if not 1 <= slices <= most_slices(length, multiple):
        raise PlanError(
            f"A sequence of {length} tokens cannot be cut into this number of slices"
            + (f" of at least {multiple} tokens." if multiple > 1 else "."),
            where=where,
            seen=slices,
            allowed=f"1 to {most_slices(length, multiple)}",
            next_step="use fewer slices, or longer sequences"
            + ("; a smaller `slice_multiple`, or the tokens of each slice, allow shorter ones" if multiple > 1 else ""),
        )


class SliceCutter:
    """Equal-cost cuts of one sequence, with a cache of slice costs between the allowed boundaries."""

    def __init__(self, length: int, time_of: TimeOf, multiple: int = 1) -> None:
        self.length, self.multiple, self.time_of = length, multiple, time_of
        self.places = places_of(length, multiple)
        self.cells = len(self.places) - 1
        self._rows: dict[int, Array] = {}

    def equal_cost(self, slices: int) -> tuple[int, ...]:
        """Return the equal-cost slicing; see the function of this name."""
        check_number(self.length, slices, self.multiple)
        bound_s, furthest = self._least_bound(slices)
        earliest = self._earliest_boundaries(bound_s, slices)
        parts = [i / slices for i in range(slices + 1)]
        even_s = [late - (late - early) * part for late, early, part in zip(furthest, earliest, parts, strict=True)]
        even = [self.cells * part for part in parts]
        tries = [self._nearest_boundaries(wanted, earliest, bound_s) for wanted in (even_s, even)]
        stops = min(
            (boundaries for boundaries in tries if self._stays_within(boundaries, bound_s)),
            key=self._unevenness,
            default=furthest,
        )
        return tuple(int(size) for size in np.diff(self.places[stops]))

    def _nearest_boundaries(self, wanted: Sequence[float], earliest: Sequence[int], bound_s: float) -> list[int]:
        """Return boundaries as near to the wanted ones as the bound allows; none earlier than the earliest."""
        stops, slices = [0], len(wanted) - 1
        for i in range(1, slices):
            cell = max(round(wanted[i]), earliest[i], stops[-1] + 1)
            stops.append(min(cell, self._furthest_stop(stops[-1], bound_s, slices - i)))
        return [*stops, self.cells]

    def _unevenness(self, stops: Sequence[int]) -> tuple[float, float, int]:
        """Return (total time, deviation from equal times, deviation from equal numbers of cells) of the slices."""
        times = [float(self._slice_row(start)[stop - start - 1]) for start, stop in pairwise(stops)]
        total = math.fsum(times)
        spread = math.fsum((time / total) ** 2 for time in times) if total else 0.0
        cells = sum((stop - start) ** 2 for start, stop in pairwise(stops))
        return _round_digits(total), _round_digits(spread), cells

    def _stays_within(self, stops: Sequence[int], bound_s: float) -> bool:
        rising = all(start < stop for start, stop in pairwise(stops))
        return rising and self._slowest_slice_s(stops) <= bound_s * LIMIT_ROUNDING

    def _least_bound(self, slices: int) -> tuple[float, list[int]]:
        """Return the least cost of the most expensive slice, and its boundaries. Even slices are the fallback."""
        best = [-(-self.cells * i // slices) for i in range(slices + 1)]
        low, high = 0.0, self._slowest_slice_s(best)
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            stops = self._furthest_boundaries(middle, slices)
            if stops[-1] == self.cells:
                high, best = min(middle, self._slowest_slice_s(stops)), stops
            else:
                low = middle
        within = self._furthest_boundaries(high, slices)
        return high, within if within[-1] == self.cells else best

    def _slowest_slice_s(self, stops: Sequence[int]) -> float:
        return max(float(self._slice_row(start)[stop - start - 1]) for start, stop in pairwise(stops))

    def _slice_row(self, start: int) -> Array:
        """Return the seconds of the slices that begin at boundary `start`, by their last cell; never decreasing."""
        if start not in self._rows:
            sizes = self.places[start + 1 :] - self.places[start]
            times = self.time_of(sizes, np.full_like(sizes, self.places[start]))
            self._rows[start] = np.maximum.accumulate(np.asarray(times, dtype=np.float64))
        return self._rows[start]

    def _furthest_stop(self, start: int, bound_s: float, left: int) -> int:
        """Return the end of the longest slice within the bound that leaves a cell to each of `left` more slices;
        `start` if no slice is within it."""
        last = start + int(np.searchsorted(self._slice_row(start), bound_s * LIMIT_ROUNDING, side="right"))
        return min(last, self.cells - left)

    def _furthest_boundaries(self, bound_s: float, slices: int) -> list[int]:
        """Return the boundaries of slices as long as the bound allows; fewer if a slice does not fit."""
        stops = [0]
        for left in reversed(range(slices)):
            stops.append(self._furthest_stop(stops[-1], bound_s, left))
            if stops[-1] == stops[-2]:
                break
        return stops

    def _earliest_boundaries(self, bound_s: float, slices: int) -> list[int]:
        """Return the earliest boundaries from which the remaining slices reach the end within the bound."""
        stops = [self.cells]
        for left in reversed(range(1, slices)):
            low, high = left, stops[-1] - 1
            while low < high:
                middle = (low + high) // 2
                low, high = (
                    (low, middle) if self._furthest_stop(middle, bound_s, 0) >= stops[-1] else (middle + 1, high)
                )
            stops.append(high)
        return [0, *reversed(stops)]
