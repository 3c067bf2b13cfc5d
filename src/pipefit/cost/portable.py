"""Arithmetic whose last bit is the same on every processor, for whatever plans follow from.

IEEE 754 fixes the result of + - * / and of square roots, nothing else: numpy's `exp`, `log` and `power` are other code
on processors with other vector units, those of the C library too, and a matrix product adds in the order that suits
the processor. What stands here is made of the operations that are fixed, in an order that is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TWO_HIGH, _TWO_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
"""The logarithm of two in two parts: a whole number of up to twenty bits times the first is exact."""

_LOG_TERMS, _EXP_TERMS = 12, 15
"""Terms of the series, enough for the last bit."""


def portable_log(values: Floats | Sequence[float]) -> Floats:
    """Natural logarithms of positive numbers: by the series of the inverse hyperbolic tangent."""
    part, power = np.frexp(np.asarray(values, dtype=np.float64))
    small = part < math.sqrt(0.5)
    part, power = np.where(small, 2 * part, part), power - small
    ratio = (part - 1.0) / (part + 1.0)
    square = ratio * ratio
    series = np.zeros_like(square)
    for term in reversed(range(_LOG_TERMS)):
        series = series * square + 1.0 / (2 * term + 1)
    logs: Floats = power * _TWO_HIGH + (2.0 * ratio * series + power * _TWO_LOW)
    return logs


def portable_exp(value: float) -> float:
    """The exponential of a number, by its series."""
    power = round(value / (_TWO_HIGH + _TWO_LOW))
    rest = (value - power * _TWO_HIGH) - power * _TWO_LOW
    series = 1.0
    for term in reversed(range(1, _EXP_TERMS)):
        series = 1.0 + rest / term * series
    return math.ldexp(series, power)


def portable_power(base: float, exponent: float) -> float:
    """A positive number to any power."""
    return portable_exp(float(portable_log([base])[0]) * exponent)


def whole_power(base: Floats, exponent: Floats | int) -> Floats:
    """Numbers to whole powers, by squaring."""
    left = np.asarray(exponent, dtype=np.int64)
    power: Floats = np.ones(np.broadcast_shapes(base.shape, left.shape))
    while left.any():
        power = np.where(left & 1, power * base, power)
        base, left = base * base, left >> 1
    return power


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers; of one alone that number itself."""
    if len(values) == 1:
        return float(values[0])
    return portable_exp(float(portable_log(values).sum()) / len(values))
