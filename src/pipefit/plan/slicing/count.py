"""How many slices: where the time to fill the pipeline, which slices shorten, meets what each of them costs anew.

With m sequences in turn on K lanes, v stages on each, and C(s) seconds of one sequence in s slices on a lane, a step
takes about T(s) = (m + (K - 1) / (s v)) C(s), whatever the schedule, as long as it does not idle between. Where slices
cost o seconds anew each, however many they are, C(s) = C + s o, and T is least at s* = sqrt((K - 1) C / (m v o)) (dT/ds
= 0; for v = 1 the sum of TeraPipe's equation 5, arXiv 2102.07988, for equal slices and m sequences). C(s) grows faster
where short slices fill the device less and less, so here it is a table, and T is looked up for each number on a ladder.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from pipefit.cost.types import Array
from pipefit.plan.slicing.cuts import Counts, most_slices

LADDER = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of slices that are tried."""

AROUND = 2
"""Steps of the ladder to either side of the best one."""


def slice_count_ladder(length: int, multiple: int) -> Counts:
    """1, and the numbers of the ladder that a sequence allows whose slices have at least `multiple` tokens."""
    limit = most_slices(length, multiple)
    return np.array([1, *(number for number in LADDER if number <= limit)])


def step_s(lanes: int, sequences: int, numbers: Counts, lane_s: Array, turns: int = 1, idle: float = 1.0) -> Array:
    """T for each of these numbers of slices: seconds of a step. `lane_s` is C of them; `idle` the part of the filling
    that is idle, less than 1 where backwards are split."""
    steps: Array = (sequences + idle * (lanes - 1) / (turns * numbers)) * lane_s
    return steps


def promising_counts(numbers: Counts, steps_s: Array, most: float) -> tuple[int, ...]:
    """The number with the least time and its neighbours, as far as they take less than 1, which comes first; none above
    `most` but the first of them."""
    allowed = max(2, bisect_right(numbers.tolist(), most))
    steps_s = steps_s[:allowed]
    best = int(np.argmin(steps_s))
    near = range(max(1, best - AROUND), min(len(steps_s), best + AROUND + 1)) if best else ()
    return tuple(int(numbers[index]) for index in near if steps_s[index] < steps_s[0])
