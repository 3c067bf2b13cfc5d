"""Low-rank structure of link times, for hosts that do not form classes.

The logarithm of a link's time, minus the effects of its two hosts, is modelled as a product of two short vectors, one
per host: matrix completion with factors of low rank, by alternating ridge regressions (Hastie, Mazumder, Lee and Zadeh
2015, "Matrix completion and low-rank SVD via fast alternating least squares"). Both directions of a pair count as one.
"""

from __future__ import annotations

import numpy as np

from pipefit.cost.types import Array, Ints

RANKS = (2, 4, 6)
"""Ranks to try: distances in a plane are nearly products of these ranks."""

ALTERNATIONS = 20

FACTOR_RIDGE = 0.02
"""Ridge weight, relative to the data of an average host."""

UNSEEN = 1e-3


def factor_residuals(values: Array, source: Ints, target: Ints, count: int, rank: int) -> Array:
    """Return [source, target]: the product of rank `rank` fitted to the values (one a measurement) minus the host
    effects.

    It is fitted to the measured links and returned for all. Symmetric.
    """
    pair = np.minimum(source, target) * count + np.maximum(source, target)
    times = np.bincount(pair, minlength=count * count).reshape(count, count).astype(np.float64)
    total = np.bincount(pair, weights=values, minlength=count * count).reshape(count, count)
    times, total = times + times.T, total + total.T
    weight = (times > 0).astype(np.float64)
    seen = np.where(times > 0, total / np.maximum(times, 1.0), 0.0)
    draw = np.random.default_rng(rank)
    left, right = draw.normal(0.0, 0.1, (count, rank)), draw.normal(0.0, 0.1, (count, rank))
    mean, host = float(values.mean()), np.zeros(count)
    for _ in range(ALTERNATIONS):
        rest = (seen - mean - host[None, :] - (left @ right.T)) * weight
        host = rest.sum(axis=1) / np.maximum(weight.sum(axis=1), 1.0)
        rest = (seen - mean - host[:, None] - host[None, :]) * weight
        left = _solve_factors(rest, weight, right)
        right = _solve_factors(rest.T, weight.T, left)
    product = left @ right.T
    return np.asarray((product + product.T) / 2)


def _solve_factors(rest: Array, weight: Array, other: Array) -> Array:
    """Return the factor of every row, by least squares with a ridge."""
    squares = np.einsum("ij,jr,js->irs", weight, other, other, optimize=True)
    ridge = FACTOR_RIDGE * max(UNSEEN, float(np.mean(other**2))) * np.maximum(weight.sum(axis=1), 1.0)
    squares += ridge[:, None, None] * np.eye(other.shape[1])
    return np.asarray(np.linalg.solve(squares, (rest @ other)[:, :, None])[:, :, 0])
