"""Fit a few positive constants to published times by Gauss-Newton on logarithms, with one Jacobian.

Times are nearly products of powers of such constants (a time over a rate, a cost times a count). In logarithms the
model is therefore nearly linear, and the Jacobian at the start serves for every step and every part of a split. It is
computed from predictions alone, without published numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pipefit.cost.types import Array

Predict = Callable[[Array], Array]
"""Maps constants to the time of every row."""

NUDGE = 0.02
"""Relative step of a constant in the finite differences of the Jacobian."""


def log_jacobian(predict: Predict, start: Sequence[float]) -> Array:
    """Return d log(time) / d log(constant) at `start`: an array [row, constant]."""
    base = np.log(predict(np.asarray(start, dtype=np.float64)))
    columns = []
    for index in range(len(start)):
        nudged = np.array(start, dtype=np.float64)
        nudged[index] *= 1.0 + NUDGE
        columns.append((np.log(predict(nudged)) - base) / np.log1p(NUDGE))
    return np.stack(columns, axis=1)


def fit_constants(
    predict: Predict,
    published: Sequence[float],
    start: Sequence[float],
    jacobian: Array,
    *,
    most: Sequence[float] | None = None,
    steps: int = 3,
    pull: float = 0.02,
    reach: float = np.inf,
) -> Array:
    """Return the constants, none above `most`, for which `predict` is close to the published times of the same rows.

    `pull` is the weight of the penalty on the distance to `start`; a constant without influence on any row stays there.
    Residuals beyond `reach` (in logarithms) have reduced weight (Huber, 1964), so that outliers have little influence.
    """
    from scipy.optimize import lsq_linear

    first = np.log(np.asarray(start, dtype=np.float64))
    current = first.copy()
    ceiling = np.full(len(first), np.inf) if most is None else np.log(np.asarray(most, dtype=np.float64))
    goal = np.log(np.asarray(published, dtype=np.float64))
    for _ in range(steps):
        missing = goal - np.log(predict(np.exp(current)))
        weight = np.sqrt(np.minimum(1.0, reach / np.abs(missing).clip(1e-12)))
        matrix = np.vstack([jacobian * weight[:, None], pull * np.eye(len(first))])
        right = np.concatenate([missing * weight, pull * (first - current)])
        current = current + lsq_linear(matrix, right, bounds=(-np.inf, ceiling - current + 1e-9)).x
    return np.exp(np.minimum(current, ceiling))
