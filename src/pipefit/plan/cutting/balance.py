"""Balance of lanes that hold several stages: such a pipeline waits for its busiest lane.

The cut starts with equal parts of the chain's time. Then one layer at a time moves between neighbouring stages while
that lowers the sum of the squares of the lanes' times. This local search is not exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pipefit.cost.types import Array, Ints

STAGE = 1e-3
"""Weight of the squares of the stages' times beside the lanes': prefers equal stages among equal lanes."""


def balance_lanes(times_s: Array, placement: Sequence[int]) -> tuple[int, ...]:
    """Return boundaries (0, cut, ..., layers) with balanced lanes. `times_s[s][l]` is the time of layer l on the
    devices of stage s; `placement` is each stage's lane."""
    stages, layers = times_s.shape
    sums = np.concatenate([np.zeros((stages, 1)), np.cumsum(times_s, axis=1)], axis=1)
    mean_sums = sums.mean(axis=0)
    bounds = np.searchsorted(mean_sums, mean_sums[-1] * np.arange(stages + 1) / stages)
    bounds = np.minimum(np.maximum(bounds, np.arange(stages + 1)), layers - np.arange(stages, -1, -1))
    bounds = np.maximum.accumulate(bounds - np.arange(stages + 1)) + np.arange(stages + 1)
    lanes = np.asarray(placement)
    stage_indices = np.arange(stages)
    for _ in range(stages * layers):
        stage = sums[stage_indices, bounds[1:]] - sums[stage_indices, bounds[:-1]]
        move, gain = _best_move(times_s, bounds, stage, _lane_sums(lanes, stage), lanes)
        if gain <= 1e-9 * float(stage.max()) ** 2:
            break
        bounds[abs(move)] += 1 if move > 0 else -1
    return tuple(int(bound) for bound in bounds)


def lane_times(times_s: Array, bounds: Sequence[int], placement: Sequence[int]) -> Array:
    """Return the time of every lane under a cut."""
    stage = [float(times_s[s, a:b].sum()) for s, (a, b) in enumerate(pairwise(bounds))]
    return _lane_sums(np.asarray(placement), stage)


def _best_move(times_s: Array, bounds: Ints, stage: Array, lane: Array, lanes: Ints) -> tuple[int, float]:
    """Return (boundary, decrease of the sum of squares) of the best single move; the boundary is negative to move it
    down."""
    inner = np.arange(1, len(stage))
    left, right = inner - 1, inner
    best, best_gain = 1, 0.0
    for sign in (1, -1):
        giving, taking = (right, left) if sign > 0 else (left, right)
        layer = bounds[inner] if sign > 0 else bounds[inner] - 1
        allowed = bounds[giving + 1] - bounds[giving] > 1
        gone, come = times_s[giving, layer % times_s.shape[1]], times_s[taking, layer % times_s.shape[1]]
        apart = lanes[giving] != lanes[taking]
        change = _square_change(lane[lanes[giving]], lane[lanes[taking]], gone, come) * apart
        change = change + STAGE * _square_change(stage[giving], stage[taking], gone, come)
        gains = np.where(allowed, -change, -np.inf)
        top = int(gains.argmax())
        if gains[top] > best_gain:
            best, best_gain = sign * int(inner[top]), float(gains[top])
    return best, best_gain


def _lane_sums(lanes: Ints, stage: Any) -> Array:
    return np.bincount(lanes, weights=stage).astype(np.float64)


def _square_change(giver: Array, taker: Array, gone: Array, come: Array) -> Array:
    change: Array = (giver - gone) ** 2 - giver**2 + (taker + come) ** 2 - taker**2
    return change
