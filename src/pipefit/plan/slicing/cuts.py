"""Slicings with a given number of slices: all equally long, or all equally expensive.

Later slices attend to more keys, so slices that cost the same become shorter towards the end (Li et al. 2021, arXiv
2102.07988, section 3.3; Sun et al. 2024, arXiv 2406.03488, section 3.3, for FLOPs). Lengths are multiples of what
kernels and shards want; what the sequence has beyond such a multiple lengthens the last slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import PlanError

Counts = NDArray[np.int64]
Seconds = NDArray[np.float64]

TimeOf = Callable[[Counts, Counts], Seconds]
"""(tokens of slices, tokens before them) -> seconds of each; arrays of one shape. It grows with the tokens, and of two
slices that end at the same token the shorter one costs no more."""

CLOSE = 1e-7
"""Bounds on the most expensive slice that differ by this share are taken as equal."""

ROUNDING = 1 + 1e-12


def vectorize_times(time_of: Callable[[int, int], float]) -> TimeOf:
    """A function of one slice as a function of arrays."""

    def times_of_arrays(tokens: Counts, past: Counts) -> Seconds:
        pairs = zip(tokens.tolist(), past.tolist(), strict=True)
        return np.array([time_of(length, before) for length, before in pairs], dtype=np.float64)

    return times_of_arrays


def slice_grain(*sizes: int) -> int:
    """The least number of tokens of which slices are made: a multiple of a kernel's tile, of the shards, and so on."""
    return math.lcm(*sizes)


def most_slices(length: int, multiple: int = 1) -> int:
    """The most slices that a sequence of `length` tokens has when each has at least `multiple`."""
    return max(1, length // multiple)


def past_of(slices: Sequence[int]) -> Counts:
    """Tokens before each slice."""
    return np.concatenate([[0], np.cumsum(slices)[:-1]]).astype(np.int64)


def places_of(length: int, multiple: int = 1) -> Counts:
    """The tokens at which slices may begin and end: multiples, and the end of the sequence for the last of them."""
    places = np.arange(most_slices(length, multiple) + 1, dtype=np.int64) * multiple
    places[-1] = length
    return places


def slice_times(slices: Sequence[int], time_of: TimeOf) -> Seconds:
    """Seconds of each slice."""
    return time_of(np.asarray(slices, dtype=np.int64), past_of(slices))


def uniform_slices(length: int, slices: int, multiple: int = 1) -> tuple[int, ...]:
    """Slices of equal length, as far as `multiple` allows: those that are longer come first.

    Raises PlanError where the sequence is too short for that many.
    """
    check_number(length, slices, multiple)
    places = places_of(length, multiple)
    cells = len(places) - 1
    stops = [-(-cells * i // slices) for i in range(slices + 1)]
    return tuple(int(size) for size in np.diff(places[stops]))


def equal_cost(length: int, slices: int, time_of: TimeOf, multiple: int = 1) -> tuple[int, ...]:
    """The slicing whose most expensive slice is as cheap as any slicing's; below that bound the slices cost the same,
    as far as `multiple` allows, and where short ones cost as much as long ones they are as long.

    The bound is found by bisection: with a bound, slices that are as long as it allows reach furthest. Between the
    boundaries reached so from the start and from the end, the slack is shared out evenly, in cost or in tokens,
    whichever takes less. That needs a slice to cost no less than one that begins later and ends where it does; where
    short slices hardly cost less than long ones, a long past can make it otherwise, and then the result is only no
    worse than even slices. Raises PlanError where the sequence is too short for that many slices.
    """
    return SliceCutter(length, time_of, multiple).equal_cost(slices)


def _round_digits(number: float) -> float:
    """To nine digits: sums of the same figures in another order are equal."""
    return float(f"{number:.9g}")


def check_number(length: int, slices: int, multiple: int, where: str = "the number of slices") -> None:
    """Raises PlanError where there cannot be so many slices of at least `multiple` tokens."""
    if not 1 <= slices <= most_slices(length, multiple):
        raise PlanError(
            f"A sequence of {length} tokens cannot be cut into so many slices"
            + (f" of at least {multiple} tokens." if multiple > 1 else "."),
            where=where,
            seen=slices,
            allowed=f"1 to {most_slices(length, multiple)}",
            next_step="use fewer slices, or longer sequences"
            + ("; a smaller `slice_multiple`, or the tokens of each slice, allow shorter ones" if multiple > 1 else ""),
        )


class SliceCutter:
    """Equal-cost cuts of one sequence; knows what slices cost between the places at which they may begin and end."""

    def __init__(self, length: int, time_of: TimeOf, multiple: int = 1) -> None:
        self.length, self.multiple, self.time_of = length, multiple, time_of
        self.places = places_of(length, multiple)
        self.cells = len(self.places) - 1
        self._rows: dict[int, Seconds] = {}

    def equal_cost(self, slices: int) -> tuple[int, ...]:
        """See the function of this name."""
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
        """Boundaries as near to the wanted ones as the bound allows; none earlier than the earliest."""
        stops, slices = [0], len(wanted) - 1
        for i in range(1, slices):
            cell = max(round(wanted[i]), earliest[i], stops[-1] + 1)
            stops.append(min(cell, self._furthest_stop(stops[-1], bound_s, slices - i)))
        return [*stops, self.cells]

    def _unevenness(self, stops: Sequence[int]) -> tuple[float, float, int]:
        """What all slices take; how far that is from the same of each; how far from as many cells of each."""
        times = [float(self._slice_row(start)[stop - start - 1]) for start, stop in pairwise(stops)]
        total = sum(times)
        spread = sum((time / total) ** 2 for time in times) if total else 0.0
        cells = sum((stop - start) ** 2 for start, stop in pairwise(stops))
        return _round_digits(total), _round_digits(spread), cells

    def _stays_within(self, stops: Sequence[int], bound_s: float) -> bool:
        rising = all(start < stop for start, stop in pairwise(stops))
        return rising and self._slowest_slice_s(stops) <= bound_s * ROUNDING

    def _least_bound(self, slices: int) -> tuple[float, list[int]]:
        """The cost of the most expensive slice of the slicing where that is least, and its boundaries. Even slices are
        kept where none is found that is cheaper."""
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

    def _slice_row(self, start: int) -> Seconds:
        """Seconds of the slices that begin at place `start`, by their last cell; never falling."""
        if start not in self._rows:
            sizes = self.places[start + 1 :] - self.places[start]
            times = self.time_of(sizes, np.full_like(sizes, self.places[start]))
            self._rows[start] = np.maximum.accumulate(np.asarray(times, dtype=np.float64))
        return self._rows[start]

    def _furthest_stop(self, start: int, bound_s: float, left: int) -> int:
        """The place where the longest slice within the bound ends that leaves a cell to each of `left` more slices;
        `start` where no slice is within it."""
        last = start + int(np.searchsorted(self._slice_row(start), bound_s * ROUNDING, side="right"))
        return min(last, self.cells - left)

    def _furthest_boundaries(self, bound_s: float, slices: int) -> list[int]:
        """The boundaries of slices that each are as long as the bound allows; fewer where one does not fit in it."""
        stops = [0]
        for left in reversed(range(slices)):
            stops.append(self._furthest_stop(stops[-1], bound_s, left))
            if stops[-1] == stops[-2]:
                break
        return stops

    def _earliest_boundaries(self, bound_s: float, slices: int) -> list[int]:
        """The earliest boundaries from which the rest of the slices reach the end within the bound."""
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
