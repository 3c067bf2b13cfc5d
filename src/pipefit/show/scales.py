"""Maps from values to the coordinates of a drawing."""

from __future__ import annotations

import math


class LinearScale:
    """A linear map from values to drawing coordinates."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self.low, self.start = low, start
        self.slope = (stop - start) / (high - low if high > low else 1.0)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) * self.slope


class LogScale:
    """A logarithmic map from positive values to drawing coordinates."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self.low, self.high = low, high
        self._linear = LinearScale(math.log(low), math.log(high), start, stop)

    def __call__(self, value: float) -> float:
        return self._linear(math.log(value))
