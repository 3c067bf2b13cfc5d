"""Fitting a few positive constants to published times: Gauss-Newton on logarithms, with one Jacobian.

Times are nearly powers of such constants (a time over a rate, a cost times a count), so in logarithms the model is
nearly linear and the Jacobian at the start serves for every step and every part of a split. It is made from
predictions alone: no published number enters it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pipefit.cost.types import Array

Predict = Callable[[Array], Array]
"""Constants -> the time of every row."""

NUDGE = 0.02
"""Relative change of a constant for the Jacobian's differences."""


def log_jacobian(predict: Predict, start: Sequence[float]) -> Array:
    """d log(time) / d log(constant) at `start`: an array [row, constant]."""
    base = np.log(predict(np.asarray(start, dtype=np.float64)))
    columns = []
    for place in range(len(start)):
        nudged = np.array(start, dtype=np.float64)
        nudged[place] *= 1.0 + NUDGE
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
    """Constants, none above `most`, that bring `predict` close to the published times of the same rows.

    `pull` is the weight with which a constant is drawn to its start, so that one that no row tells of stays there.
    Residuals beyond `reach` (in logarithms) count less, as Huber (1964) weighs them: outliers decide little.
    """
    from scipy.optimize import lsq_linear

    first = np.log(np.asarray(start, dtype=np.float64))
    place = first.copy()
    ceiling = np.full(len(first), np.inf) if most is None else np.log(np.asarray(most, dtype=np.float64))
    goal = np.log(np.asarray(published, dtype=np.float64))
    for _ in range(steps):
        missing = goal - np.log(predict(np.exp(place)))
        weight = np.sqrt(np.minimum(1.0, reach / np.abs(missing).clip(1e-12)))
        matrix = np.vstack([jacobian * weight[:, None], pull * np.eye(len(first))])
        right = np.concatenate([missing * weight, pull * (first - place)])
        place = place + lsq_linear(matrix, right, bounds=(-np.inf, ceiling - place + 1e-9)).x
    return np.exp(np.minimum(place, ceiling))
