"""How long direct collectives (grouped calls, all-to-all) really take, size by size, against what their links make of
them.

No straight line holds for them: over gloo a device begins the next broadcast as soon as the rest of its message fits
into the socket's buffer, so that short messages overlap; NCCL changes its protocol with the size. So the price at a
size goes through the measured times (benchmarks/uneven_collectives.py).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipefit.cost.portable import geometric_mean

LEAST = 1e-3
"""A factor below this is a measurement that saw no cost at all; factors are averaged as logarithms."""


class DirectCurve:
    """One collective of even parts over one group, measured: piecewise linear in the bytes of a part from what it takes
    without any to its largest message; beyond, the last slope goes on. `s_per_byte` is what links make of a byte of
    every part."""

    def __init__(
        self, latency_s: float, part_bytes: Sequence[float], time_s: Sequence[float], s_per_byte: float
    ) -> None:
        self.places = (0.0, *part_bytes)
        self.times = tuple(itertools.accumulate((latency_s, *time_s), max))
        self.s_per_byte = s_per_byte

    @property
    def last_factor(self) -> float:
        """Of very large messages: seconds a byte, over what the links make of it."""
        return max(LEAST, self._knot_slope(len(self.places) - 1) / self.s_per_byte)

    def time_factor(self, part_bytes: float) -> float:
        """Time beside the latency, over what the links make of parts of so many bytes."""
        size = max(1.0, part_bytes)
        knot = min(max(1, bisect.bisect_left(self.places, size)), len(self.places) - 1)
        time_s = self.times[knot] + (size - self.places[knot]) * self._knot_slope(knot)
        return max(LEAST, (time_s - self.times[0]) / (size * self.s_per_byte))

    def _knot_slope(self, knot: int) -> float:
        """Before a knot."""
        return (self.times[knot] - self.times[knot - 1]) / (self.places[knot] - self.places[knot - 1])


@dataclass(frozen=True, slots=True)
class SizeCorrection:
    """By what a price leaves its straight line where the largest part is not that of an even cut."""

    curves: tuple[DirectCurve, ...]
    whole_bytes: float
    "Of the tensor."
    size: int
    "Devices."
    cuts: int
    "How many cuts make a message: two of an all-to-all, whose messages are parts of parts."

    @property
    def even_factor(self) -> float:
        """The factor of the seconds a byte of an even cut: the geometric mean over the measured groups."""
        return self._fraction_factor(1.0 / self.size**self.cuts)

    def relative_factor(self, *parts: Sequence[float]) -> float:
        """The factor of these parts (of every cut, fractions by position), over that of an even cut."""
        return self._fraction_factor(math.prod(max(cut_parts) for cut_parts in parts[: self.cuts])) / self.even_factor

    def _fraction_factor(self, fraction: float) -> float:
        return geometric_mean([curve.time_factor(self.whole_bytes * fraction) for curve in self.curves])
