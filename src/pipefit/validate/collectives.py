"""Times of intra-host collectives from a published table of all-reduces. The table is fixed for every data set that
uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Points = tuple[tuple[float, float], ...]
"""(bytes, seconds) of an all-reduce, ascending in bytes."""


@dataclass(frozen=True, slots=True)
class MeasuredAllReduces:
    """Measured all-reduces by number of devices."""

    points: Mapping[int, Points]

    def collective_s(self, kind: str, devices: int, size_bytes: float) -> float:
        """Return the seconds of a collective whose full tensor has `size_bytes`. An all-gather or reduce-scatter takes
        half an all-reduce, because a ring all-reduce sends the same bytes in each of its two passes."""
        if devices == 1:
            return 0.0
        points = self.points[devices]
        return all_reduce_s(points, size_bytes) * (1.0 if kind == "all_reduce" else 0.5)


def all_reduce_s(points: Points, size_bytes: float) -> float:
    """Return the seconds of an all-reduce: interpolated between the measured sizes, at the bandwidth of the largest
    size above it, and the time of the smallest size below it."""
    sizes, times = [size for size, _ in points], [time for _, time in points]
    if size_bytes > sizes[-1]:
        return times[-1] * size_bytes / sizes[-1]
    return float(np.interp(size_bytes, sizes, times))
