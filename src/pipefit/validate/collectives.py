"""Collectives inside a host from a published table of all-reduces: frozen constants of every set that uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Points = tuple[tuple[float, float], ...]
"""(bytes, seconds) of an all-reduce, ascending in bytes."""


@dataclass(frozen=True, slots=True)
class MeasuredAllReduces:
    """Measured all-reduces by the number of devices."""

    points: Mapping[int, Points]

    def collective_s(self, kind: str, devices: int, size_bytes: float) -> float:
        """Of a collective whose whole tensor has that many bytes. An all-gather or a reduce-scatter is half an
        all-reduce: a ring sends the same bytes in each of its two passes."""
        if devices == 1:
            return 0.0
        points = self.points[devices]
        return all_reduce_s(points, size_bytes) * (1.0 if kind == "all_reduce" else 0.5)


def all_reduce_s(points: Points, size_bytes: float) -> float:
    """Seconds of an all-reduce: linear between the measured sizes, the bandwidth of the largest beyond it, and the
    time of the smallest below it."""
    sizes, times = [size for size, _ in points], [time for _, time in points]
    if size_bytes > sizes[-1]:
        return times[-1] * size_bytes / sizes[-1]
    return float(np.interp(size_bytes, sizes, times))
