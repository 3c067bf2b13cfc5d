"""Measured times of direct collectives (grouped calls, all-to-all) as factors of the times computed from their links.

The times are not a straight line in the size. Over gloo a device begins the next broadcast as soon as the rest of its
message fits into the socket's buffer, so short messages overlap; NCCL changes its protocol with the size. The price at
a size is therefore interpolated between measured times (benchmarks/collectives/uneven.py).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipefit.cost.portable import geometric_mean

MIN_FACTOR = 1e-3
"""Smallest factor: a lower one comes from a measurement without visible cost; factors are averaged as logarithms."""


class DirectCurve:
    """Measured times of one collective with even parts on one group of devices.

    The curve is piecewise linear in the bytes of a part, from the latency to the largest message; beyond, the last
    slope continues. `s_per_byte` is the time computed from the links for one byte of every part.
    """

    def __init__(
        self, latency_s: float, part_bytes: Sequence[float], time_s: Sequence[float], s_per_byte: float
    ) -> None:
        self.places = (0.0, *part_bytes)
        self.times = tuple(itertools.accumulate((latency_s, *time_s), max))
        self.s_per_byte = s_per_byte

    @property
    def last_factor(self) -> float:
        """Factor of very large messages: measured seconds per byte / seconds per byte computed from the links."""
        return max(MIN_FACTOR, self._knot_slope(len(self.places) - 1) / self.s_per_byte)

    def time_factor(self, part_bytes: float) -> float:
        """Return (time - latency) / (time computed from the links) for parts of `part_bytes` bytes."""
        size = max(1.0, part_bytes)
        knot = min(max(1, bisect.bisect_left(self.places, size)), len(self.places) - 1)
        time_s = self.times[knot] + (size - self.places[knot]) * self._knot_slope(knot)
        return max(MIN_FACTOR, (time_s - self.times[0]) / (size * self.s_per_byte))

    def _knot_slope(self, knot: int) -> float:
        """Return the slope before a knot."""
        return (self.times[knot] - self.times[knot - 1]) / (self.places[knot] - self.places[knot - 1])


@dataclass(frozen=True, slots=True)
class SizeCorrection:
    """Deviation of a price from its straight line when the largest part differs from that of an even cut."""

    curves: tuple[DirectCurve, ...]
    whole_bytes: float
    "Bytes of the tensor."
    size: int
    "Number of devices."
    cuts: int
    "Number of cuts that form a message: two in an all-to-all, where messages are parts of parts."

    @property
    def even_factor(self) -> float:
        """Factor of the seconds per byte of an even cut: the geometric mean over the measured groups."""
        return self._fraction_factor(1.0 / self.size**self.cuts)

    def relative_factor(self, *parts: Sequence[float]) -> float:
        """Return the factor of these parts (fractions by position, for every cut) / the factor of an even cut."""
        return self._fraction_factor(math.prod(max(cut_parts) for cut_parts in parts[: self.cuts])) / self.even_factor

    def _fraction_factor(self, fraction: float) -> float:
        return geometric_mean([curve.time_factor(self.whole_bytes * fraction) for curve in self.curves])
