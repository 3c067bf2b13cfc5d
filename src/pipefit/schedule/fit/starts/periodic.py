"""Repeating blocks with real offsets, tuned: one offset for each F, I and W of a stage, and one period.

The wishes of a block do not depend on the number of microbatches, so that a handful of numbers stands for thousands of
operations. `greedy.construct` says in microseconds an operation what a block leads to, ends included, within memory;
a random search over the offsets does the rest.
"""

from __future__ import annotations

import math
import time

import numpy as np

from pipefit.schedule.fit.instance import Floats, I, Instance, W
from pipefit.schedule.fit.kernels.arrays import Loops
from pipefit.schedule.fit.kernels.sweep import Tables
from pipefit.schedule.fit.local.improve import Budget
from pipefit.schedule.fit.starts.construct import Builder, merged_stages, swept
from pipefit.schedule.fit.starts.modulo import offsets
from pipefit.schedule.fit.starts.start import Start

COST = 30
"""Moves that one construction counts as."""
MOST = 1500
"""Blocks that are tried from one start."""


MOST_STEADY, LEAST_STEADY = 3000, 100
STEADY_COST = 60
"""Moves of the local search that one move of the search for a steady state counts as, with 16 stages."""
STEADY_S = 2.5e-4
"""Seconds that it takes, about."""


def repeating(instance: Instance, t: Tables, loops: Loops, budget: Budget, seed: int) -> list[Start]:
    """What the shortest steady state found leads to, if there is one."""
    size = (16 / instance.stages) ** 2
    moves = int(min(MOST_STEADY, (budget.moves - budget.spent) / STEADY_COST) * size)
    if budget.until_s < math.inf:
        left = max(budget.until_s - time.perf_counter(), 0.0)
        moves = min(moves, int(0.15 * left / STEADY_S * size))
    if moves < LEAST_STEADY:
        return []
    found = offsets(instance, moves=moves, seed=seed)
    if found is None:
        return []
    builder = Builder(instance, t, loops, found.merged)
    time_s = builder.repeated(found.offset_s, found.period_s)
    return [builder.start(time_s, "steady state")] if time_s < math.inf else []


def tuned(instance: Instance, t: Tables, loops: Loops, start: Start, budget: Budget, seed: int) -> Start | None:
    """The best orders that blocks near the steady state of `start` lead to."""
    offset, period = steady(instance, t, loops, start)
    builder = Builder(instance, t, loops, merged_stages(instance, start.orders))
    random = np.random.default_rng(seed)
    step = float(instance.time_s[:3].mean())
    name = f"{start.name}, tuned"
    time_s = builder.repeated(offset, period)
    best = builder.start(time_s, name) if time_s < math.inf else None
    tries = min(MOST, budget.moves // COST)
    for n in range(tries):
        if not budget.take(COST):
            break
        budget.spent += COST
        near, stretch = changed(random, offset, step * (1.0 - n / tries) + 0.05 * step)
        time_s = builder.repeated(near, period * stretch)
        if time_s < math.inf and (best is None or time_s <= best.time_s):
            best, offset, period = builder.start(time_s, name), near, period * stretch
    return best


def steady(instance: Instance, t: Tables, loops: Loops, start: Start) -> tuple[Floats, float]:
    """([kind, stage] offsets, period) of the middle of a schedule."""
    begin = swept(instance, t, loops, start.orders).begin.reshape(3, instance.stages, instance.units)
    begin = np.stack([begin[0], begin[I], np.where(begin[W] < 1e299, begin[W], begin[I] + instance.time_s[I])])
    begin[I:] = begin[I:][:, :, instance.backwards]
    middle, reach = instance.units // 2, max(1, min(6, instance.units // 4))
    low, high = middle - reach, min(middle + reach, instance.units - 1)
    period = float((begin[:, :, high] - begin[:, :, low]).mean()) / max(high - low, 1)
    n = np.arange(low, high + 1)
    offset: Floats = np.median(begin[:, :, low : high + 1] - period * n, axis=2)
    return offset, period


def changed(random: np.random.Generator, offset: Floats, step: float) -> tuple[Floats, float]:
    """Other offsets, and a factor for the period: one offset moves, or those of one kind on a run of stages, all alike
    or ever more; or the period changes."""
    kinds, stages = offset.shape
    which, by = int(random.integers(16)), step * int(random.integers(-1000, 1001)) / 500.0
    kind, first = int(random.integers(kinds)), int(random.integers(stages))
    last = int(random.integers(first, stages)) + 1
    near = offset.copy()
    if which == 0:
        return near, 1.0 + 0.02 * int(random.integers(-1000, 1001)) / 1000.0
    if which < 8:
        near[kind, first] += by
    elif which < 12:
        near[kind, first:last] += by
    else:
        near[kind, first:last] += by * (np.arange(last - first) + 1) / 4.0
    return near, 1.0
