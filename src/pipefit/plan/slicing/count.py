"""The number of slices: a trade-off between the pipeline's fill time, which slices shorten, and their overhead.

With m sequences in turn on K lanes, v stages on each, and C(s) seconds of one sequence in s slices on a lane, a step
takes about T(s) = (m + (K - 1) / (s v)) C(s) under any schedule without idle time in between. If each slice has an
overhead of o seconds, C(s) = C + s o, and T is least at s* = sqrt((K - 1) C / (m v o)) (dT/ds = 0; for v = 1 the sum of
TeraPipe's equation 5, arXiv 2102.07988, for equal slices and m sequences). C(s) grows faster than that if short slices
underuse the device. So C is a table here, and T is evaluated for each number on a ladder.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from pipefit.cost.types import Array, Ints
from pipefit.plan.slicing.cuts import most_slices

LADDER = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of slices to try."""

AROUND = 2
"""Steps of the ladder on either side of the best number."""


def slice_count_ladder(length: int, multiple: int) -> Ints:
    """Return 1 and the numbers of the ladder for which slices have at least `multiple` tokens."""
    limit = most_slices(length, multiple)
    return np.array([1, *(number for number in LADDER if number <= limit)])


def step_s(lanes: int, sequences: int, numbers: Ints, lane_s: Array, turns: int = 1, idle: float = 1.0) -> Array:
    """Return T, the seconds of a step, for each number of slices. `lane_s` is C; `idle` is the idle part of the fill
    time, less than 1 if backward passes are split."""
    steps: Array = (sequences + idle * (lanes - 1) / (turns * numbers)) * lane_s
    return steps


def promising_counts(numbers: Ints, steps_s: Array, most: float) -> tuple[int, ...]:
    """Return the number with the least time and its neighbours that beat a single slice, which is the first entry.
    Numbers above `most` are excluded, except the smallest above 1."""
    allowed = max(2, bisect_right(numbers.tolist(), most))
    steps_s = steps_s[:allowed]
    best = int(np.argmin(steps_s))
    near = range(max(1, best - AROUND), min(len(steps_s), best + AROUND + 1)) if best else ()
    return tuple(int(numbers[index]) for index in near if steps_s[index] < steps_s[0])
