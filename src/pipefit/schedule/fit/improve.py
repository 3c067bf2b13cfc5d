"""Local search on orders: many small random moves, of which those that cost little are kept (`kernel.anneal`).

The starts race: a few of the best get some moves each, the best of these the rest. The heat, what a move may cost,
falls from a tenth of a mean operation in cycles that grow, so that a search that is stopped early has cooled down, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipefit.schedule.fit.arrays import Loops, state, trial
from pipefit.schedule.fit.construct import Start
from pipefit.schedule.fit.instance import Instance
from pipefit.schedule.fit.kernel import Tables

RACERS = 6
RACE_SHARE = 0.4
"""Of all moves, what the race takes."""
CYCLE = 4000
"""Moves of the first cycle; each following one has twice as many."""
CHUNK = 1000
"""Moves between two looks at the clock."""
HOT, COLD = 0.12, 0.008
"""Of a mean operation."""


@dataclass(slots=True)
class Budget:
    """What is left to spend."""

    moves: int
    until_s: float
    spent: int = 0

    def take(self, most: int) -> int:
        """So many moves now; 0 when the budget is spent."""
        if time.perf_counter() > self.until_s:
            return 0
        return max(min(most, self.moves - self.spent), 0)


def improve(instance: Instance, t: Tables, loops: Loops, starts: list[Start], budget: Budget, seed: int) -> Start:
    """The best orders found from `starts`, which are sorted by time."""
    racers = starts[:RACERS]
    share = int(budget.moves * RACE_SHARE) // max(len(racers), 1)
    if len(racers) > 1 and share >= 1000:
        racers = [
            run(instance, t, loops, one, Budget(share, budget.until_s), seed + n, budget)
            for n, one in enumerate(racers)
        ]
    best = min(racers, key=lambda one: one.time_s)
    return run(instance, t, loops, best, Budget(budget.moves - budget.spent, budget.until_s), seed + 99, budget)


def run(
    instance: Instance, t: Tables, loops: Loops, start: Start, budget: Budget, seed: int, whole: Budget | None = None
) -> Start:
    """One search from one start."""
    s = state(t, instance, start.orders)
    assert loops.sweep(t, s)
    r = trial(t, s, seed)
    best, size = s.order.copy(), s.length.copy()
    mean = float(t.time[np.concatenate(start.orders)].mean())
    settings = np.array([0.02, s.value[0] + 0.02 * s.value[1], 60.0, 85.0, 0.0, 8.0])
    for moves in cycles(budget.moves):
        heats = np.array([HOT * mean, COLD * mean, (COLD / HOT) ** (1.0 / moves)])
        left = moves
        while left > 0:
            now = budget.take(min(left, CHUNK))
            if not now:
                left = -1
                break
            loops.anneal(t, s, r, best, size, heats, settings, now)
            budget.spent += now
            left -= now
        if left < 0:
            break
    if whole is not None:
        whole.spent += budget.spent
    s = state(t, instance, [best[lane, : size[lane]].astype(np.int32) for lane in range(instance.lanes)])
    assert loops.sweep(t, s)
    if float(s.value[0]) > start.time_s:
        return start
    return Start(float(s.value[0]), start.name, [s.order[k, : s.length[k]].astype(np.int32) for k in range(len(size))])


def cycles(moves: int) -> Iterator[int]:
    """The lengths of the cycles that so many moves are cut into."""
    length = CYCLE
    while moves > 0:
        now = moves if moves < 2 * length else length
        yield now
        moves -= now
        length *= 2
