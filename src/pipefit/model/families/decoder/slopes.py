"""Slopes of ALiBi (Press et al., 2022)."""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head: powers of 2^(-8/n) for n heads, n a power of two. Further heads take every second
    slope of twice as many heads."""
    power = 2 ** math.floor(math.log2(heads))
    base = 2.0 ** -(2.0 ** -(math.log2(power) - 3))
    slopes = [base**i for i in range(1, power + 1)]
    if power < heads:
        wider = 2.0 ** -(2.0 ** -(math.log2(2 * power) - 3))
        slopes += [wider**i for i in range(1, 2 * (heads - power) + 1, 2)]
    return slopes
