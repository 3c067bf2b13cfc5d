"""Local search on orders: many small random moves, of which those that cost little are kept (`kernel.anneal`).

The starts race: a few of the best get some moves each, the best of these the rest. The heat, what a move may cost,
falls from a tenth of a mean operation in cycles that grow, so that a search that is stopped early has cooled down, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipefit.schedule.fit.arrays import Loops, state, trial
from pipefit.schedule.fit.construct import Start, fits, swept
from pipefit.schedule.fit.instance import B, I, Instance, W
from pipefit.schedule.fit.kernel import Tables

RACERS = 6
RACE_SHARE = 0.4
"""Of all moves, what the race takes."""
CYCLE = 4000
"""Moves of the first cycle; each following one has twice as many."""
CHUNK = 1000
"""Moves between two looks at the clock."""
WEIGHT = 0.02
"""Of the sum of the lanes' ends, beside the objective."""
SHARES = 60, 25
"""Of a hundred moves: shifts of one operation, of a run. The rest are waves."""
REACH = 8
"""Places that one operation is shifted at most."""
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
    s = swept(instance, t, loops, start.orders)
    r = trial(t, s, seed)
    best, size = s.order.copy(), s.length.copy()
    mean = float(t.time[np.concatenate(start.orders)].mean())
    value = s.value[0] + WEIGHT * s.value[1]
    settings = np.array([WEIGHT, value, toggles(instance), *np.cumsum(SHARES) + toggles(instance), REACH])
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
    s = swept(instance, t, loops, [best[lane, : size[lane]].astype(np.int32) for lane in range(instance.lanes)])
    if float(s.value[0]) > start.time_s:
        return start
    return Start(float(s.value[0]), start.name, [s.order[k, : s.length[k]].astype(np.int32) for k in range(len(size))])


def merge_neighbours(instance: Instance, t: Tables, loops: Loops, start: Start) -> Start:
    """The orders with every I that its own W follows at once turned into a B with it, where B takes no longer and the
    objective does not grow."""
    quicker = instance.time_s[B] <= (instance.time_s[I] + instance.time_s[W]) * (1 + 1e-12)
    quicker &= instance.may_merge[:, None]
    pairs = [
        (lane, int(one))
        for lane, order in enumerate(start.orders)
        for one, other in pairwise(order)
        if instance.parts(one)[0] == I
        and instance.parts(other) == (W, *instance.parts(one)[1:])
        and quicker[instance.parts(one)[1:]]
    ]
    groups = [pairs] + ([[pair] for pair in pairs] if len(pairs) > 1 else [])
    for group in groups:
        orders = [order.copy() for order in start.orders]
        for lane, one in group:
            _, stage, unit = instance.parts(one)
            place = int(np.flatnonzero(orders[lane] == one)[0])
            orders[lane][place] = instance.operation(B, stage, unit)
            orders[lane] = np.delete(orders[lane], place + 1)
        s = state(t, instance, orders)
        if group and loops.sweep(t, s) and s.value[0] <= start.time_s and fits(t, s, orders):
            start = Start(float(s.value[0]), start.name, orders)
            if group is pairs:
                break
    return start


def toggles(instance: Instance) -> int:
    """Of a hundred moves, how many choose anew between B and I with W: none where B is no quicker."""
    gain = instance.time_s[I] + instance.time_s[W] - instance.time_s[B]
    return 10 if bool((gain.max(axis=1) > 1e-9)[instance.may_split & instance.may_merge].any()) else 0


def cycles(moves: int) -> Iterator[int]:
    """The lengths of the cycles that so many moves are cut into."""
    length = CYCLE
    while moves > 0:
        now = moves if moves < 2 * length else length
        yield now
        moves -= now
        length *= 2
