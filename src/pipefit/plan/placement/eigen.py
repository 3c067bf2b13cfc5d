"""Eigenvectors of a symmetric matrix, in an order of operations that is fixed.

LAPACK's are others in the last bits on other processors, and where hosts are alike an order by the entries of one
turns on those. Householder's reduction to three diagonals, then QL with implicit shifts (EISPACK's tred2 and tql2).
"""

from __future__ import annotations

import math

import numpy as np

from pipefit.cost.types import Array

_ROUNDS = 60
"""QL steps for one eigenvalue; two are usual."""


def symmetric_eigenvectors(matrix: Array) -> tuple[Array, Array]:
    """(eigenvalues, ascending; eigenvectors, the columns)."""
    diagonal, beside, rows = _three_diagonals(matrix)
    values = _turned_to_one(diagonal, beside, rows)
    order = np.argsort(values, kind="stable")
    return values[order], rows[order].T


def _three_diagonals(matrix: Array) -> tuple[list[float], list[float], Array]:
    """(diagonal, beside it, rows): `rows` is orthogonal, rows @ matrix @ rows.T has these diagonals and zeros."""
    left, count = np.array(matrix, dtype=np.float64), len(matrix)
    rows = np.eye(count)
    for step in range(count - 2):
        mirror = left[step + 1 :, step].copy()
        length = math.sqrt(float((mirror * mirror).sum()))
        if float((mirror[1:] * mirror[1:]).sum()) == 0.0:
            continue
        mirror[0] += math.copysign(length, mirror[0])
        double = 2.0 / float((mirror * mirror).sum())
        below = left[step + 1 :, step + 1 :]
        image = double * (below * mirror).sum(axis=1)
        image -= 0.5 * double * float((mirror * image).sum()) * mirror
        across = mirror[:, None] * image
        below -= across + across.T
        left[step + 1, step] = -math.copysign(length, float(left[step + 1, step]))
        left[step + 2 :, step] = 0.0
        under = rows[step + 1 :]
        under -= (double * mirror)[:, None] * (mirror[:, None] * under).sum(axis=0)
    return np.diag(left).tolist(), [*np.diag(left, -1).tolist(), 0.0], rows


def _turned_to_one(diagonal: list[float], beside: list[float], rows: Array) -> Array:
    """The eigenvalues of the matrix of three diagonals; `rows` are turned into the eigenvectors."""
    count = len(diagonal)
    for first in range(count):
        for _ in range(_ROUNDS):
            last = next(
                (
                    place
                    for place in range(first, count - 1)
                    if abs(beside[place]) <= 1e-16 * (abs(diagonal[place]) + abs(diagonal[place + 1]))
                ),
                count - 1,
            )
            if last == first:
                break
            _chase(diagonal, beside, rows, first, last)
    return np.array(diagonal)


def _chase(diagonal: list[float], beside: list[float], rows: Array, first: int, last: int) -> None:
    """One QL step with an implicit shift on the block from `first` to `last`."""
    shift = (diagonal[first + 1] - diagonal[first]) / (2.0 * beside[first])
    root = math.copysign(math.sqrt(shift * shift + 1.0), shift)
    shift = diagonal[last] - diagonal[first] + beside[first] / (shift + root)
    sine = cosine = 1.0
    carried = 0.0
    for place in reversed(range(first, last)):
        across, along = sine * beside[place], cosine * beside[place]
        length = math.sqrt(across * across + shift * shift)
        beside[place + 1] = length
        if length == 0.0:
            diagonal[place + 1] -= carried
            beside[last] = 0.0
            return
        sine, cosine = across / length, shift / length
        shift = diagonal[place + 1] - carried
        length = (diagonal[place] - shift) * sine + 2.0 * cosine * along
        carried = sine * length
        diagonal[place + 1] = shift + carried
        shift = cosine * length - along
        upper, lower = rows[place], rows[place + 1]
        rows[place], rows[place + 1] = cosine * upper - sine * lower, sine * upper + cosine * lower
    diagonal[first] -= carried
    beside[first] = shift
    beside[last] = 0.0
