"""Candidates of a search: made one by one, the most promising first, from the arrays of their panels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipefit.cost.pipeline.contention import Pipelines
from pipefit.cost.types import Array, CostTable
from pipefit.cost.work import PipelineWork
from pipefit.plan.assemble.pipeline_work import Parts
from pipefit.plan.bounds.step_bounds import Ints
from pipefit.plan.candidates.grid import Panel, spread
from pipefit.plan.candidates.grid_bounds import Floors
from pipefit.plan.request.decisions import Decisions

HOPELESS = 2.5
"""How many times its memory a candidate may need, by a count that takes every lane for the fullest, to be tried."""


@dataclass(slots=True)
class Candidate:
    decisions: Decisions
    level: int = 0
    "How closely it has been looked at."
    bound_s: float = 0.0
    even_s: float = 0.0
    "The bound of the first level."
    guess_s: float = 0.0
    "What it likely takes, where bounds are loose."
    leaner: int = 0
    "How often its layers were cut again because it needed more memory than the closed form says."
    parts: Parts | None = None
    work: PipelineWork | None = None
    costs: CostTable | None = None
    alone: Pipelines | None = None

    @property
    def key_s(self) -> float:
        """By what candidates are looked at: their bound, or a guess where bounds are loose."""
        return max(self.bound_s, self.guess_s)


def queues(floors: Floors, space: Sequence[Panel]) -> list[Queue]:
    """A queue for every panel."""
    found: dict[int, Queue] = {}
    for places, floor in floors.batches(space):
        bounds = floors.bound_s(floor)
        keys, guesses = bounds[..., None], None
        if not floor.fused or not floor.alike or floor.panels[0].slices:
            guesses = floors.guesses_s(floor)
            keys = np.maximum(keys, guesses.min(axis=1))
        least = zip(keys.min(axis=(1, 2, 3)).tolist(), bounds.min(axis=(1, 2)).tolist(), strict=True)
        for at, (place, both) in enumerate(zip(places, least, strict=True)):
            own = None if guesses is None else guesses[at]
            found[place] = Queue(floor.panels[at], keys[at], bounds[at], own, both)
    return [found[place] for place in range(len(space))]


class Queue:
    """The candidates of a panel that have not been made yet, the most promising first. `keys` [microbatches,
    recomputation, ZeRO-1] say which; `least` of keys and bounds. They are put in order when the first is wanted: of
    most panels none ever is."""

    def __init__(
        self, panel: Panel, keys: Array, bounds: Array, guesses: Array | None, least: tuple[float, float]
    ) -> None:
        self.panel = panel
        self.key_s, self.bound_s = least
        self._figures = keys, bounds, guesses
        self._left: Ints | None = None

    @property
    def _ordered(self) -> Ints:
        if self._left is None:
            keys, bounds, guesses = self._figures
            self._bound_s, self._keys = spread(bounds, self.panel), spread(keys, self.panel)
            named = zip(self.panel.names, guesses if guesses is not None else (), strict=False)
            self._guess_s = {name: spread(one, self.panel) for name, one in named}
            self._sort(np.arange(len(self._keys)))
        assert self._left is not None
        return self._left

    def _sort(self, left: Ints) -> None:
        self._left = left[np.argsort(self._keys[left], kind="stable")]
        self._at = 0
        self._least = np.minimum.accumulate(self._bound_s[self._left][::-1])[::-1]
        self._tell()

    def _tell(self) -> None:
        """The key of the next one, and the least bound of all that are left."""
        if not self.empty:
            self.key_s = float(self._keys[self._ordered[self._at]])
            self.bound_s = float(self._least[self._at])

    @property
    def empty(self) -> bool:
        return self._left is not None and self._at >= len(self._left)

    def by_bound(self) -> None:
        """What is left, by its bounds from now on."""
        if self._left is None:
            _, bounds, guesses = self._figures
            self._figures = bounds, bounds, guesses
            self.key_s = self.bound_s
        else:
            self._keys = self._bound_s
            self._sort(self._left[self._at :])

    def next(self) -> list[Candidate]:
        """The next one, a candidate for each of its schedules."""
        index = int(self._ordered[self._at])
        bound_s = float(self._bound_s[index])
        self._at += 1
        self._tell()
        return [
            Candidate(
                decisions,
                bound_s=bound_s,
                even_s=bound_s,
                guess_s=float(self._guess_s[decisions.schedule][index]) if self._guess_s else 0.0,
            )
            for decisions in self.panel.told_apart(index)
        ]

    def rest(self) -> Iterator[Decisions]:
        """What is left."""
        return itertools.chain.from_iterable(map(self.panel.told_apart, self._ordered[self._at :].tolist()))


def leanest_first(floors: Floors, space: Sequence[Panel]) -> Iterator[Decisions]:
    """The candidates of these panels, those that likely need least of their memory first; not those that need more
    than HOPELESS times of it."""
    fills, sizes = [], []
    for panel in space:
        fills += [spread(one, panel) for one in floors.fills(panel)]
        sizes += [len(fills[-1])] * len(panel.names)
    whole = np.concatenate(fills)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    owner = [(panel, name) for panel in space for name in panel.names]
    order = np.argsort(whole, kind="stable")
    for index in order[: int(np.count_nonzero(whole <= HOPELESS))].tolist():
        line = int(np.searchsorted(starts, index, side="right")) - 1
        panel, name = owner[line]
        decisions = panel.decisions(index - int(starts[line]))
        if name in panel.able(decisions.units):
            yield replace(decisions, schedule=name)
