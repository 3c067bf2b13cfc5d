"""Local search on orders: many small random moves, of which those that cost little are kept (`moves.anneal`).

The starts race: in every round each gets some moves, and the better half goes on with twice as many. When one is left,
and has had its turn, the next generation begins, with other random numbers and twice the moves. In each run the heat,
what a move may cost, falls from a tenth of a mean operation to next to nothing, so that a search that is stopped early
has cooled down, too.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipefit.schedule.fit.arrays import Loops, state, trial
from pipefit.schedule.fit.construct import fits, swept
from pipefit.schedule.fit.instance import B, I, Instance, W
from pipefit.schedule.fit.kernel import Tables
from pipefit.schedule.fit.start import Start

RACERS = 8
FIRST_LENGTH = 1000
"""Moves of a racer in the first round of the first generation."""
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
    "On the clock of `time.perf_counter`."
    spent: int = 0

    def take(self, most: int) -> int:
        """So many moves now; 0 when the budget is spent."""
        if time.perf_counter() > self.until_s:
            return 0
        return max(min(most, self.moves - self.spent), 0)

    def part(self, share: float) -> Budget:
        """A share of what is left."""
        now = time.perf_counter()
        until_s = now + share * max(self.until_s - now, 0.0) if self.until_s < math.inf else math.inf
        return Budget(int(share * (self.moves - self.spent)), until_s)


def improve(instance: Instance, t: Tables, loops: Loops, starts: list[Start], budget: Budget, seed: int) -> Start:
    """The best orders found from `starts`, which are sorted by time."""
    best = starts[0]
    generation = 0
    while budget.take(1):
        length = FIRST_LENGTH << generation
        draws = seed + 1000 * generation
        pool = starts[: 1 if generation and len(starts) == 1 else RACERS]
        while len(pool) > 1 and budget.take(1):
            pool = [run(instance, t, loops, one, budget, draws + n, length) for n, one in enumerate(pool)]
            pool = sorted(pool, key=lambda one: one.time_s)[: len(pool) // 2]
            length *= 2
        for one in sorted((*pool, best), key=lambda one: one.time_s)[: 1 + (generation > 0)]:
            found = run(instance, t, loops, one, budget, draws + 500, 2 * length)
            best = min(best, found, key=lambda one: one.time_s)
        generation += 1
    return best


def run(
    instance: Instance, t: Tables, loops: Loops, start: Start, budget: Budget, seed: int, moves: int | None = None
) -> Start:
    """What `moves` moves (default: all of the budget's) make of a start, while the heat falls once."""
    moves = budget.moves - budget.spent if moves is None else moves
    if not budget.take(moves):
        return start
    s = swept(instance, t, loops, start.orders)
    r = trial(t, s, seed)
    best, size = s.order.copy(), s.length.copy()
    mean = float(t.time[np.concatenate(start.orders)].mean())
    value = s.value[0] + WEIGHT * s.value[1]
    settings = np.array([WEIGHT, value, toggles(instance), *np.cumsum(SHARES) + toggles(instance), REACH])
    heats = np.array([HOT * mean, COLD * mean, (COLD / HOT) ** (1.0 / moves)])
    while moves > 0:
        now = budget.take(min(moves, CHUNK))
        if not now:
            break
        loops.anneal(t, s, r, best, size, heats, settings, now)
        budget.spent += now
        moves -= now
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
    """Of a hundred moves, how many choose anew between B and I with W: none where B saves neither time nor memory."""
    return 10 if instance.open_stages().any() else 0
