"""Local search over slicings, judged by a function of the caller: the simulator on the real schedule with its memory
limit.

Equal-cost cuts and TeraPipe's program know neither the schedule nor its memory. Here the number of slices changes while
their proportions stay, boundaries move by ever finer steps, and slices merge and split. It stops when the value no
longer falls or the evaluations are used. Deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Slices = tuple[int, ...]

SlicingScore = tuple[float, float]
"""(bytes missing, seconds of a step): smaller is better, so slicings that fit come first."""

FINER = 4
"""First step of a boundary as a fraction of the mean slice (1 / FINER); later steps are divided by it repeatedly."""


@dataclass(frozen=True, slots=True)
class RefinedSlicing:
    """The best slicing found."""

    slices: Slices
    value: SlicingScore
    evaluations: int
    "Number of slicings judged, including the starts."


def refine_slices(
    starts: Sequence[Slices], value_of: Callable[[Slices], SlicingScore], *, multiple: int = 1, evaluations: int = 100
) -> RefinedSlicing:
    """Return the best slicing reached from the best of `starts`, which sum to one length.

    Slices stay multiples of `multiple` if the starts are: boundaries move by multiples of it, and slices are cut at
    them. At most `evaluations` slicings are judged, at least one.
    """
    search = _SliceSearch(value_of, max(1, evaluations))
    for start in dict.fromkeys(starts):
        search.is_improvement(start)
    before = None
    while before != search.best and not search.is_exhausted:
        before = search.best
        _change_number(search, multiple)
        for step in _step_sizes(search.best, multiple):
            _move_boundaries(search, step, multiple)
        for candidate in (*_merge_neighbours(search.best), *_split_slices(search.best, multiple)):
            search.is_improvement(candidate)
    return RefinedSlicing(search.best, search.value, len(search.known))


def stretch_slices(slices: Slices, number: int, multiple: int = 1) -> Slices:
    """Return a slicing into `number` slices of about the same proportions, by linear interpolation of the
    boundaries."""
    length, number = sum(slices), max(1, min(number, sum(slices) // multiple))
    wanted = np.interp(
        np.arange(number + 1) / number, np.arange(len(slices) + 1) / len(slices), [0, *np.cumsum(slices)]
    )
    stops = [0]
    for left, boundary in zip(reversed(range(1, number)), wanted[1:-1], strict=True):
        cell = min(max(round(boundary / multiple), stops[-1] // multiple + 1), length // multiple - left)
        stops.append(cell * multiple)
    return tuple(int(size) for size in np.diff([*stops, length]))


class _SliceSearch:
    """The best slicing so far, and all slicings judged."""

    def __init__(self, value_of: Callable[[Slices], SlicingScore], evaluations: int) -> None:
        self.value_of, self.left = value_of, evaluations
        self.known: dict[Slices, SlicingScore] = {}
        self.best: Slices = ()
        self.value: SlicingScore = (float("inf"), float("inf"))

    @property
    def is_exhausted(self) -> bool:
        return self.left <= 0

    def is_improvement(self, slices: Slices) -> bool:
        """Judge a slicing unless it is known or the evaluations are used. Returns whether it is now the best or equal
        to it.

        Equal values count: with several longest slices, shortening one alone does not help yet.
        """
        if slices in self.known or self.is_exhausted:
            return False
        self.left -= 1
        self.known[slices] = value = self.value_of(slices)
        if self.best and not value <= self.value:
            return False
        self.best, self.value = slices, value
        return True


def _change_number(search: _SliceSearch, multiple: int) -> None:
    """Double the number of slices, add one, or remove one, while that helps."""
    for times, more in ((2, 0), (1, 1), (1, -1)):
        while search.is_improvement(stretch_slices(search.best, times * len(search.best) + more, multiple)):
            pass


def _step_sizes(slices: Slices, multiple: int) -> list[int]:
    """Return the tokens by which boundaries move, coarse to fine."""
    step = sum(slices) // len(slices) // FINER // multiple * multiple
    steps = []
    while step > multiple:
        steps.append(step)
        step = step // FINER // multiple * multiple
    return [*steps, multiple]


def _move_boundaries(search: _SliceSearch, step: int, multiple: int) -> None:
    """Move every boundary, and all boundaries from it on, in both directions while that helps."""
    again = True
    while again and not search.is_exhausted:
        again = False
        for index in range(len(search.best) - 1):
            for partner in dict.fromkeys((index + 1, len(search.best) - 1)):
                for tokens in (step, -step):
                    while search.is_improvement(_move_tokens(search.best, index, partner, tokens, multiple)):
                        again = True


def _move_tokens(slices: Slices, index: int, other: int, tokens: int, multiple: int) -> Slices:
    """Return the slicing with `tokens` moved from slice `other` to slice `index`; unchanged if one would be too
    short."""
    changed = list(slices)
    changed[index] += tokens
    changed[other] -= tokens
    return tuple(changed) if min(changed[index], changed[other]) >= multiple else slices


def _merge_neighbours(slices: Slices) -> Iterator[Slices]:
    """Yield every merge of two neighbours, the last first: later slices are the shorter ones."""
    for index in reversed(range(len(slices) - 1)):
        yield (*slices[:index], slices[index] + slices[index + 1], *slices[index + 2 :])


def _split_slices(slices: Slices, multiple: int) -> Iterator[Slices]:
    """Yield every split of a slice in two, the longer part first."""
    for index, size in enumerate(slices):
        first = -(-(size // multiple) // 2) * multiple
        if size // multiple >= 2:
            yield (*slices[:index], first, size - first, *slices[index + 1 :])
