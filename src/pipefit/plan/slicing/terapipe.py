"""TeraPipe's slicing: the dynamic program of Li et al. 2021 (arXiv 2102.07988, section 3.3), exact on its objective.

With all forwards before all backwards, K equal stages and t_i the seconds of slice i on one of them (forward and
backward together), a step takes sum t_i + (K - 1) max t_j (equation 5). For a bound on the longest slice, the least sum
is a shortest path over the allowed ends of slices (equation 8). The module `bounds` finds the best bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipefit.cost.types import Array, Ints
from pipefit.plan.slicing.bounds import NO_BOUND, BoundedSlicing, best_bound
from pipefit.plan.slicing.cuts import TimeOf, places_of
from pipefit.schedule.taskgraph.kernel import choose_loop


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlicing:
    """The slices of one sequence, with their times on one stage."""

    slices: tuple[int, ...]
    "Tokens."
    total_s: float
    longest_s: float
    step_s: float
    "The value of TeraPipe's objective."


def best_slicing(
    length: int,
    stages: float,
    time_of: TimeOf,
    *,
    multiple: int = 8,
    sequences: int = 1,
    eps_s: float = 0.0,
    compiled: bool | None = None,
) -> SequenceSlicing:
    """Return the slicing of `sequences` sequences, sliced alike, with the least total time on `stages` stages.

    K lanes with v stages each fill like 1 + (K - 1) / v stages. Slices are multiples of `multiple` tokens; the
    remainder lengthens the last one. O(cells^2) for a bound, and some hundred bounds. `eps_s`: see `best_bound`.
    `compiled` forces numba on or off.
    """
    paths = SlicePaths(length, time_of, multiple, compiled)

    def slice_within(bound_s: float) -> BoundedSlicing:
        bounded = paths.solve_within(bound_s)
        return BoundedSlicing(sequences * bounded.total_s, bounded.longest_s)

    bound_s, bounded = best_bound(paths.candidates, slice_within, stages, eps_s)
    return SequenceSlicing(
        slices=paths.slices_within(bound_s),
        total_s=bounded.total_s / sequences,
        longest_s=bounded.longest_s,
        step_s=bounded.step_s(stages),
    )


class SlicePaths:
    """The slicings of one sequence as paths over the allowed ends of slices, with the time of every slice."""

    def __init__(self, length: int, time_of: TimeOf, multiple: int = 1, compiled: bool | None = None) -> None:
        self.places = places_of(length, multiple)
        self.times = slice_table(self.places, time_of)
        self.candidates: list[float] = np.unique(self.times[np.isfinite(self.times)]).tolist()
        "Every possible time of a slice, ascending."
        cells = len(self.places) - 1
        self._shortest = choose_loop(shortest_path, cells * cells // 2, compiled)
        self._total: Array = np.zeros(cells + 1)
        self._longest: Array = np.zeros(cells + 1)
        self._last: Ints = np.zeros(cells + 1, dtype=np.int64)

    def solve_within(self, bound_s: float) -> BoundedSlicing:
        """Return the least sum of slices that are all within the bound."""
        total_s = float(self._shortest(self.times, bound_s, self._total, self._longest, self._last))
        return BoundedSlicing(total_s, float(self._longest[-1]) if total_s < NO_BOUND else NO_BOUND)

    def slices_within(self, bound_s: float) -> tuple[int, ...]:
        """Return the tokens of the slices found by `solve_within`."""
        assert self.solve_within(bound_s).total_s < NO_BOUND, "no slicing is within the bound"
        stops = [len(self.places) - 1]
        while stops[-1]:
            stops.append(stops[-1] - int(self._last[stops[-1]]))
        return tuple(int(size) for size in np.diff(self.places[stops[::-1]]))


def slice_table(places: Ints, time_of: TimeOf) -> Array:
    """Return [end - 1][cells - 1]: seconds of the slice of this many cells that ends at place `end`; infinite if it
    would begin before the sequence."""
    cells = len(places) - 1
    times = np.full((cells, cells), NO_BOUND)
    end, size = (index + 1 for index in np.tril_indices(cells))
    start = places[end - size]
    times[end - 1, size - 1] = time_of(places[end] - start, start)
    return times


def shortest_path(times: Any, bound_s: float, total: Any, longest: Any, last: Any) -> float:
    """Fill, for every place, the least sum of slices within the bound that end there, the longest of them, and the
    cells of the last one.

    Returns the sum of the whole sequence, infinite if there is none. Plain Python or numba.
    """
    cells = len(times)
    for end in range(1, cells + 1):
        best = np.inf
        for size in range(1, end + 1):
            time = times[end - 1, size - 1]
            if time <= bound_s and total[end - size] + time < best:
                best = total[end - size] + time
                last[end] = size
        total[end] = best
        if best < np.inf:
            longest[end] = max(longest[end - last[end]], times[end - 1, last[end] - 1])
    return float(total[cells])
