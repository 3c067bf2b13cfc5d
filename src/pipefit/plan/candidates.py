"""Candidates of a search: made one by one, the most promising first, from the arrays of their panels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipefit.cost.types import Array, CostTable
from pipefit.cost.work import PipelineWork
from pipefit.plan.bounds import Ints, facts_of
from pipefit.plan.decisions import Decisions
from pipefit.plan.floors import Floors
from pipefit.plan.panel import Panel, spread
from pipefit.plan.work import Parts

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

    @property
    def key_s(self) -> float:
        """By what candidates are looked at: their bound, or a guess where bounds are loose."""
        return max(self.bound_s, self.guess_s)


class Queue:
    """The candidates of a panel that have not been made yet, the most promising first."""

    def __init__(self, floors: Floors, panel: Panel) -> None:
        self.panel = panel
        floor = floors.panel(panel)
        self._bound_s = spread(floors.bound_s(panel, floor), panel)
        self._guess_s: dict[str, Array] = {}
        keys = self._bound_s
        if not facts_of(panel.names[0]).fused or not floor.alike or panel.slices:
            guesses = floors.guesses_s(panel, floor)
            self._guess_s = {name: spread(one, panel) for name, one in zip(panel.names, guesses, strict=True)}
            keys = np.maximum(keys, spread(guesses.min(axis=0), panel))
        self._sort(np.arange(len(keys)), keys)

    def _sort(self, left: Ints, keys: Array) -> None:
        self._left = left[np.argsort(keys[left], kind="stable")]
        self._keys = keys
        self._at = 0
        self._least = np.minimum.accumulate(self._bound_s[self._left][::-1])[::-1]

    @property
    def empty(self) -> bool:
        return self._at >= len(self._left)

    @property
    def key_s(self) -> float:
        """Of the next one."""
        return float(self._keys[self._left[self._at]])

    @property
    def bound_s(self) -> float:
        """The least of all that are left."""
        return float(self._least[self._at])

    def by_bound(self) -> None:
        """What is left, by its bounds from now on."""
        self._sort(self._left[self._at :], self._bound_s)

    def next(self) -> list[Candidate]:
        """The next one, a candidate for each of its schedules."""
        index = int(self._left[self._at])
        self._at += 1
        bound_s = float(self._bound_s[index])
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
        return itertools.chain.from_iterable(map(self.panel.told_apart, self._left[self._at :].tolist()))


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
