"""Arithmetic with identical bits on every processor, for all numbers that determine plans.

IEEE 754 fixes the results of + - * / and square roots only. numpy's `exp`, `log` and `power` use different code on
processors with different vector units, as does the C library, and the order of additions in a matrix product depends
on the processor. These functions use the fixed operations in a fixed order. Python's `sum` rounds otherwise from 3.12
on; `math.fsum` adds floats with one rounding on every version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipefit.cost.types import Array

_TWO_HIGH, _TWO_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
"""The logarithm of 2 in two parts: the product of an integer of up to 20 bits and the first part is exact."""

_LOG_TERMS, _EXP_TERMS = 12, 15
"""Number of series terms, enough for the last bit."""


def portable_log(values: Array | Sequence[float]) -> Array:
    """Return natural logarithms of positive numbers, by the series of the inverse hyperbolic tangent."""
    part, power = np.frexp(np.asarray(values, dtype=np.float64))
    small = part < math.sqrt(0.5)
    part, power = np.where(small, 2 * part, part), power - small
    ratio = (part - 1.0) / (part + 1.0)
    square = ratio * ratio
    series = np.zeros_like(square)
    for term in reversed(range(_LOG_TERMS)):
        series = series * square + 1.0 / (2 * term + 1)
    logs: Array = power * _TWO_HIGH + (2.0 * ratio * series + power * _TWO_LOW)
    return logs


def portable_exp(value: float) -> float:
    """Return the exponential of a number, by its series."""
    power = round(value / (_TWO_HIGH + _TWO_LOW))
    rest = (value - power * _TWO_HIGH) - power * _TWO_LOW
    series = 1.0
    for term in reversed(range(1, _EXP_TERMS)):
        series = 1.0 + rest / term * series
    return math.ldexp(series, power)


def portable_power(base: float, exponent: float) -> float:
    """Return a positive number to any power."""
    return portable_exp(float(portable_log([base])[0]) * exponent)


def whole_power(base: Array, exponent: Array | int) -> Array:
    """Return numbers to integer powers, by squaring."""
    left = np.asarray(exponent, dtype=np.int64)
    power: Array = np.ones(np.broadcast_shapes(base.shape, left.shape))
    while left.any():
        power = np.where(left & 1, power * base, power)
        base, left = base * base, left >> 1
    return power


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers; a single number is returned unchanged."""
    if len(values) == 1:
        return float(values[0])
    return portable_exp(float(portable_log(values).sum()) / len(values))
