"""What each slice costs anew, for the tables of the proof."""

from __future__ import annotations

from pipefit.plan.slicing.cuts import TimeOf, equal_cost, slice_times


def overhead_of(length: int, slices: int, time_of: TimeOf, multiple: int = 1) -> float:
    """Seconds that an equal-cost slicing takes more than the whole sequence, by slice.

    It holds what is launched again, contexts read again, and products too small to fill the device, which is why it
    depends on the number. `slices` is at least 2.
    """
    parts = slice_times(equal_cost(length, slices, time_of, multiple), time_of)
    whole = slice_times((length,), time_of)
    return max(0.0, float(parts.sum() - whole[0])) / (slices - 1)
