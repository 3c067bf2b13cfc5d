"""Eigenvectors of a symmetric matrix, with a fixed order of operations.

LAPACK's results differ in the last bits between processors, and for similar hosts the order by an eigenvector's entries
depends on those bits. Householder tridiagonalisation, then QL with implicit shifts (EISPACK's tred2 and tql2).
"""

from __future__ import annotations

import math

import numpy as np

from pipefit.cost.types import Array

_ROUNDS = 60
"""Maximum QL steps for one eigenvalue; two are usual."""


def symmetric_eigenvectors(matrix: Array) -> tuple[Array, Array]:
    """Return (eigenvalues, ascending; eigenvectors, the columns)."""
    diagonal, beside, rows = _three_diagonals(matrix)
    values = _turned_to_one(diagonal, beside, rows)
    order = np.argsort(values, kind="stable")
    return values[order], rows[order].T


def _three_diagonals(matrix: Array) -> tuple[list[float], list[float], Array]:
    """Return (diagonal, subdiagonal, rows) of the tridiagonal matrix rows @ matrix @ rows.T, with `rows` orthogonal."""
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
    """Return the eigenvalues of the tridiagonal matrix; `rows` are rotated into the eigenvectors in place."""
    count = len(diagonal)
    for first in range(count):
        for _ in range(_ROUNDS):
            last = next(
                (
                    index
                    for index in range(first, count - 1)
                    if abs(beside[index]) <= 1e-16 * (abs(diagonal[index]) + abs(diagonal[index + 1]))
                ),
                count - 1,
            )
            if last == first:
                break
            _chase(diagonal, beside, rows, first, last)
    return np.array(diagonal)


def _chase(diagonal: list[float], beside: list[float], rows: Array, first: int, last: int) -> None:
    """Do one QL step with an implicit shift on the block from `first` to `last`, in place."""
    shift = (diagonal[first + 1] - diagonal[first]) / (2.0 * beside[first])
    root = math.copysign(math.sqrt(shift * shift + 1.0), shift)
    shift = diagonal[last] - diagonal[first] + beside[first] / (shift + root)
    sine = cosine = 1.0
    carried = 0.0
    for index in reversed(range(first, last)):
        across, along = sine * beside[index], cosine * beside[index]
        length = math.sqrt(across * across + shift * shift)
        beside[index + 1] = length
        if length == 0.0:
            diagonal[index + 1] -= carried
            beside[last] = 0.0
            return
        sine, cosine = across / length, shift / length
        shift = diagonal[index + 1] - carried
        length = (diagonal[index] - shift) * sine + 2.0 * cosine * along
        carried = sine * length
        diagonal[index + 1] = shift + carried
        shift = cosine * length - along
        upper, lower = rows[index], rows[index + 1]
        rows[index], rows[index + 1] = cosine * upper - sine * lower, sine * upper + cosine * lower
    diagonal[first] -= carried
    beside[first] = shift
    beside[last] = 0.0
