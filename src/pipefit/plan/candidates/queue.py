"""Queues of search candidates: built one by one, the most promising first, from the arrays of their grids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipefit.cost.pipeline.contention import PipelineCosts
from pipefit.cost.types import Array, CostTable, Ints
from pipefit.cost.work import PipelineWork
from pipefit.plan.assemble.pipeline_work import PlanSkeleton
from pipefit.plan.candidates.grid import CandidateGrid, broadcast_cells
from pipefit.plan.candidates.grid_bounds import LowerBounds
from pipefit.plan.request.decisions import ParallelConfig

MAX_MEMORY_FRACTION = 2.5
"""Candidates that need more than this many times their memory are not tried. The count takes every lane as the
fullest."""

FULL = 1.0 + 1e-9
"""Memory needed, as a fraction of what there is, above which nothing fits. The margin is for rounding."""


@dataclass(slots=True)
class SearchCandidate:
    decisions: ParallelConfig
    level: int = 0
    "Number of evaluations of increasing detail done so far."
    bound_s: float = 0.0
    even_s: float = 0.0
    "Bound of the first level."
    guess_s: float = 0.0
    "Estimated step time, where bounds are loose."
    is_estimated: bool = False
    "Whether the estimate comes from a simulation of the first microbatches."
    leaner: int = 0
    "Number of times its layers were cut again because it needed more memory than the closed form says."
    parts: PlanSkeleton | None = None
    work: PipelineWork | None = None
    costs: CostTable | None = None
    alone: PipelineCosts | None = None

    @property
    def key_s(self) -> float:
        """Sort key of the search: the bound, or an estimate where bounds are loose."""
        return max(self.bound_s, self.guess_s)


def build_queues(floors: LowerBounds, space: Sequence[CandidateGrid]) -> list[CandidateQueue]:
    """Return a queue for every grid."""
    queues: dict[int, CandidateQueue] = {}
    for places, floor in floors.bound_batches(space):
        bounds = floors.state_bounds_s(floor)
        guesses = floors.guesses_s(floor)
        keys = np.maximum(bounds, guesses.min(axis=1))
        needs = floors.memory_need(floor)
        live_keys, live_bounds = keys, bounds
        if needs is not None:
            excess = np.where((needs > FULL).all(axis=1), np.inf, 0.0)
            live_keys, live_bounds = keys + excess[..., None], live_bounds + excess[..., None]
        least = zip(live_keys.min(axis=(1, 2, 3, 4)).tolist(), live_bounds.min(axis=(1, 2, 3, 4)).tolist(), strict=True)
        for batch_index, (index, both) in enumerate(zip(places, least, strict=True)):
            grid_guesses = None if guesses is None else guesses[batch_index]
            grid_needs = None if needs is None else needs[batch_index]
            queues[index] = CandidateQueue(
                floor.grids[batch_index], keys[batch_index], bounds[batch_index], grid_guesses, grid_needs, both
            )
    return [queues[index] for index in range(len(space))]


class CandidateQueue:
    """The candidates of a grid that have not been built yet, the most promising first.

    `keys` [microbatches, recomputation, sharded state, inner] define the order, `bounds` bound the step from below;
    `needs` [schedule, microbatches, recomputation, sharded state] are lower bounds of the memory, as fractions: no cut
    of a candidate above 1 fits, and it is ruled out. `least` holds the smallest key and the smallest bound of the
    remaining ones. Sorting waits until the first candidate is requested: most grids never get that far.
    """

    def __init__(
        self,
        grid: CandidateGrid,
        keys: Array,
        bounds: Array,
        guesses: Array | None,
        needs: Array | None,
        least: tuple[float, float],
    ) -> None:
        self.grid = grid
        self.key_s, self.bound_s = least
        self._figures = keys, bounds, guesses
        self._needs = needs
        self._left: Ints | None = None

    @property
    def ruled_out_count(self) -> int:
        """Number of candidates without a cut that fits, each schedule counted separately."""
        if self._needs is None:
            return 0
        able = np.array([[units >= least for units in self.grid.unit_counts] for least in self.grid.least])
        lacking = (self._needs > FULL) & able[:, :, None, None]
        return int(np.broadcast_to(lacking, self._needs.shape).sum()) * len(self.grid.inner)

    def leanest_ruled_out(self, below_s: float) -> tuple[float, ParallelConfig] | None:
        """Return (bound, candidate) of the candidate without a cut that fits and with the smallest bound of its memory,
        among those whose bound of the step is below this; None if there is none."""
        if self._needs is None:
            return None
        able = np.array([[units >= least for units in self.grid.unit_counts] for least in self.grid.least])
        bounds = np.broadcast_to(self._figures[1][..., 0], self._needs.shape[1:])
        listed = (self._needs > FULL) & able[:, :, None, None] & (bounds < below_s)
        if not listed.any():
            return None
        best = int(np.where(listed, self._needs, np.inf).argmin())
        schedule, *cell = (int(position) for position in np.unravel_index(best, self._needs.shape))
        index = int(np.ravel_multi_index((*cell, 0), self.grid.grid_shape))
        decisions = replace(self.grid.decisions_at(index), schedule=self.grid.names[schedule])
        return float(bounds[tuple(cell)]), decisions

    @property
    def _ordered_indices(self) -> Ints:
        if self._left is None:
            keys, bounds, guesses = self._figures
            self._bound_s, self._keys = broadcast_cells(bounds, self.grid), broadcast_cells(keys, self.grid)
            named = zip(self.grid.names, guesses if guesses is not None else (), strict=False)
            self._guess_s = {name: broadcast_cells(guess, self.grid) for name, guess in named}
            needs = self._needs if self._needs is not None else np.zeros((len(self.grid.names), 1))
            by_schedule = zip(self.grid.names, needs, strict=True)
            self._may_fit = {name: broadcast_cells(need, self.grid) <= FULL for name, need in by_schedule}
            self._sort_remaining(np.flatnonzero(np.logical_or.reduce([*self._may_fit.values()])))
        assert self._left is not None
        return self._left

    def _sort_remaining(self, left: Ints) -> None:
        self._left = left[np.argsort(self._keys[left], kind="stable")]
        self._at = 0
        self._least = np.minimum.accumulate(self._bound_s[self._left][::-1])[::-1]
        self._update_keys()

    def _update_keys(self) -> None:
        """Update the key of the next candidate, and the smallest bound of all remaining ones."""
        if not self.is_empty:
            self.key_s = float(self._keys[self._ordered_indices[self._at]])
            self.bound_s = float(self._least[self._at])

    @property
    def is_empty(self) -> bool:
        if self._left is None:
            return self.key_s == float("inf")
        return self._at >= len(self._left)

    def order_by_bound(self) -> None:
        """Sort the remaining candidates by their bounds from now on."""
        if self._left is None:
            _, bounds, guesses = self._figures
            self._figures = bounds, bounds, guesses
            self.key_s = self.bound_s
        else:
            self._keys = self._bound_s
            self._sort_remaining(self._left[self._at :])

    def take_next(self) -> list[SearchCandidate]:
        """Return the next candidate, once for each of its schedules."""
        index = int(self._ordered_indices[self._at])
        bound_s = float(self._bound_s[index])
        self._at += 1
        self._update_keys()
        return [
            SearchCandidate(
                decisions,
                bound_s=bound_s,
                even_s=bound_s,
                guess_s=float(self._guess_s[decisions.schedule][index]) if self._guess_s else 0.0,
            )
            for decisions in self._decisions_at(index)
        ]

    def remaining_decisions(self) -> Iterator[ParallelConfig]:
        """Yield the remaining candidates."""
        return itertools.chain.from_iterable(map(self._decisions_at, self._ordered_indices[self._at :].tolist()))

    def _decisions_at(self, index: int) -> Iterator[ParallelConfig]:
        """Yield the candidates with this flat index that may fit, one for each schedule."""
        by_schedule = self.grid.decisions_by_schedule(index)
        return (decisions for decisions in by_schedule if self._may_fit[decisions.schedule][index])


QueueEntry = CandidateQueue | SearchCandidate
"""An entry of the search's heap: the candidates of a grid that are not built yet, or one that is."""


def leanest_first(floors: LowerBounds, space: Sequence[CandidateGrid]) -> Iterator[ParallelConfig]:
    """Yield the candidates of these grids by the estimated fraction of memory they need, smallest first, up to
    MAX_MEMORY_FRACTION."""
    fills, sizes = [], []
    for grid in space:
        fills += [broadcast_cells(fraction, grid) for fraction in floors.memory_fractions(grid)]
        sizes += [len(fills[-1])] * len(grid.names)
    fractions = np.concatenate([*fills, np.zeros(0)])
    starts = np.concatenate(([0], np.cumsum(sizes)))
    owner = [(grid, name) for grid in space for name in grid.names]
    order = np.argsort(fractions, kind="stable")
    for index in order[: int(np.count_nonzero(fractions <= MAX_MEMORY_FRACTION))].tolist():
        line = int(np.searchsorted(starts, index, side="right")) - 1
        grid, name = owner[line]
        decisions = grid.decisions_at(index - int(starts[line]))
        if name in grid.feasible_schedules(decisions.unit_count):
            yield replace(decisions, schedule=name)
