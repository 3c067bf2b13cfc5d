"""What links have in common where hosts do not fall into classes: places in a space of few dimensions.

The logarithm of a link's time beside the effects of its two hosts is taken for a product of two short vectors, one for
each host: matrix completion with factors of low rank, by alternating ridge regressions (Hastie, Mazumder, Lee and Zadeh
2015, "Matrix completion and low-rank SVD via fast alternating least squares"). Both directions of a pair count as one.
"""

from __future__ import annotations

import numpy as np

from pipefit.profile.effects import Array, Indices

RANKS = (2, 4, 6)
"""That are tried: distances in a plane are nearly products of so many."""

TURNS = 20

RIDGE = 0.02
"""In units of what the rounds say of one host, were they all like the mean."""

UNSEEN = 1e-3


def factor_residuals(values: Array, source: Indices, target: Indices, count: int, rank: int) -> Array:
    """[source, target]: what is left of the values (one a measurement) when the hosts' own effects are out, as a
    product of rank `rank`; fitted to the measured links, and given for all. Symmetric."""
    way = np.minimum(source, target) * count + np.maximum(source, target)
    times = np.bincount(way, minlength=count * count).reshape(count, count).astype(np.float64)
    total = np.bincount(way, weights=values, minlength=count * count).reshape(count, count)
    times, total = times + times.T, total + total.T
    weight = (times > 0).astype(np.float64)
    seen = np.where(times > 0, total / np.maximum(times, 1.0), 0.0)
    draw = np.random.default_rng(rank)
    left, right = draw.normal(0.0, 0.1, (count, rank)), draw.normal(0.0, 0.1, (count, rank))
    whole, host = float(values.mean()), np.zeros(count)
    for _ in range(TURNS):
        rest = (seen - whole - host[None, :] - (left @ right.T)) * weight
        host = rest.sum(axis=1) / np.maximum(weight.sum(axis=1), 1.0)
        rest = (seen - whole - host[:, None] - host[None, :]) * weight
        left = _solve_factors(rest, weight, right)
        right = _solve_factors(rest.T, weight.T, left)
    product = left @ right.T
    return np.asarray((product + product.T) / 2)


def _solve_factors(rest: Array, weight: Array, other: Array) -> Array:
    """The factor of every row, by least squares with a ridge."""
    squares = np.einsum("ij,jr,js->irs", weight, other, other, optimize=True)
    ridge = RIDGE * max(UNSEEN, float(np.mean(other**2))) * np.maximum(weight.sum(axis=1), 1.0)
    squares += ridge[:, None, None] * np.eye(other.shape[1])
    return np.asarray(np.linalg.solve(squares, (rest @ other)[:, :, None])[:, :, 0])
