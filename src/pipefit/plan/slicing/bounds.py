"""Minimum of sum + (K - 1) longest over all bounds on the longest slice, without trying every bound.

TeraPipe (Li et al. 2021, arXiv 2102.07988, section 3.3) tries every entry of its table as the bound t_max, ascending,
and stops once K t_max exceeds the best time found. Optionally it skips a bound within eps of the last. Here bounds are
tried by bisection. The least sum never grows with the bound, so the sum at an interval's end and its smallest bound
limit the values inside. The result is the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NO_BOUND = float("inf")


@dataclass(frozen=True, slots=True)
class BoundedSlicing:
    """The best slicing with all slices within a bound."""

    total_s: float
    "The least sum; infinite if no slicing is within the bound."
    longest_s: float
    "The longest slice of that slicing."

    def step_s(self, stages: float) -> float:
        """Return equation 5: the sum, plus the longest slice once for every further stage."""
        return self.total_s + (stages - 1) * self.longest_s if self.total_s < NO_BOUND else NO_BOUND


def best_bound(
    candidates: Sequence[float], best_within: Callable[[float], BoundedSlicing], stages: float, eps_s: float = 0.0
) -> tuple[float, BoundedSlicing]:
    """Return (bound, best slicing within it) that minimises sum + (stages - 1) longest.

    `candidates` ascend and contain every possible time of a slice. Exact with `eps_s` 0. Otherwise intervals up to that
    width are skipped, and the result is at most stages x eps_s above the minimum.
    """
    search = _BoundSearch(candidates, best_within, stages)
    search.try_candidate(len(candidates) - 1)
    low = search.first_feasible()
    open_ = [(low, len(candidates) - 1)]
    while open_:
        low, high = open_.pop()
        low, high = search.narrow_interval(low, high)
        if high - low < 2 or search.cannot_improve(low, high) or candidates[high] - candidates[low + 1] <= eps_s:
            continue
        middle = (low + high) // 2
        search.try_candidate(middle)
        open_ += [(middle, high), (low, middle)]
    return candidates[search.best], search.seen[search.best]


class _BoundSearch:
    def __init__(
        self, candidates: Sequence[float], best_within: Callable[[float], BoundedSlicing], stages: float
    ) -> None:
        self.candidates, self.best_within, self.stages = candidates, best_within, stages
        self.seen: dict[int, BoundedSlicing] = {}
        self.best = len(candidates) - 1

    def try_candidate(self, place: int) -> BoundedSlicing:
        """Return the best slicing within a candidate, and record it if it is the best so far."""
        if place not in self.seen:
            self.seen[place] = slicing = self.best_within(self.candidates[place])
            if slicing.step_s(self.stages) < self.seen[self.best].step_s(self.stages):
                self.best = place
        return self.seen[place]

    def first_feasible(self) -> int:
        """Return the smallest candidate within which a slicing exists."""
        low, high = -1, len(self.candidates) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.try_candidate(middle).total_s < NO_BOUND else (middle, high)
        return high

    def narrow_interval(self, low: int, high: int) -> tuple[int, int]:
        """Return the interval without the bounds between the upper one's longest slice and itself: they have the same
        result."""
        used = bisect_left(self.candidates, self.seen[high].longest_s, lo=low, hi=high)
        self.seen.setdefault(used, self.seen[high])
        return low, used

    def cannot_improve(self, low: int, high: int) -> bool:
        """Return whether no bound strictly between can beat the best so far."""
        bound_s = self.candidates[low + 1]
        least_s = max(self.seen[high].total_s, bound_s) + (self.stages - 1) * bound_s
        return least_s >= self.seen[self.best].step_s(self.stages)
