"""How many slices: where the time to fill the pipeline, which slices shorten, meets what each of them costs anew.

With m sequences a replica on K stages, C seconds of a whole sequence on a stage and o more for every slice, a step
takes about T(s) = (m + (K - 1) / s) C + (m s + K - 1) o, whatever the schedule, as long as it does not idle between.
T is least at s* = sqrt((K - 1) C / (m o)) (dT/ds = 0; the sum of TeraPipe's equation 5, arXiv 2102.07988, for equal
slices and m sequences).
"""

from __future__ import annotations

import math

from pipefit.plan.slicing.cuts import Cutter, TimeOf, equal_cost, most_slices, slice_times

RISING = 4
"""Numbers of slices are tried until one is so many times the best."""

WIDE = (0.5, 1 / math.sqrt(2), math.sqrt(2), 2.0)
"""Shares of the estimate that are worth trying beside its neighbours."""


def estimate(stages: int, sequences: int, sequence_s: float, overhead_s: float) -> float:
    """s*, not rounded and at least 1; infinite where slices cost nothing anew."""
    if stages == 1 or sequence_s <= 0:
        return 1.0
    if overhead_s <= 0:
        return math.inf
    return max(1.0, math.sqrt((stages - 1) * sequence_s / (sequences * overhead_s)))


def step_s(stages: int, sequences: int, sequence_s: float, overhead_s: float, slices: float) -> float:
    """T(s): seconds of a step."""
    return (sequences + (stages - 1) / slices) * sequence_s + (sequences * slices + stages - 1) * overhead_s


def overhead_of(length: int, slices: int, time_of: TimeOf, multiple: int = 1) -> float:
    """Seconds that each slice costs anew: what an equal-cost slicing takes more than the whole sequence, by slice.

    It holds what is launched again, contexts read again, and products too small to fill the device, which is why it
    depends on the number. `slices` is at least 2.
    """
    parts = slice_times(equal_cost(length, slices, time_of, multiple), time_of)
    whole = slice_times((length,), time_of)
    return max(0.0, float(parts.sum() - whole[0])) / (slices - 1)


def estimate_for(length: int, stages: int, sequences: int, time_of: TimeOf, multiple: int = 1) -> int:
    """The number of slices at which equal-cost cuts take least, by the sum of TeraPipe's equation 5 for `sequences`
    sequences: s* where slices cost the same anew however many they are, and right about it where small ones fill the
    device less and less.

    `time_of` gives the seconds of a stage, forward and backward together, and what it waits for messages.
    """
    most = most_slices(length, multiple)
    cutter = Cutter(length, time_of, multiple)
    known: dict[int, float] = {}

    def time_s(slices: int) -> float:
        if slices not in known:
            parts = slice_times(cutter.equal_cost(slices), time_of)
            known[slices] = float(sequences * parts.sum() + (stages - 1) * parts.max())
        return known[slices]

    best = 1
    for number in sorted({min(most, round(math.sqrt(2) ** power)) for power in range(2 * most.bit_length() + 1)}):
        best = min(best, number, key=time_s)
        if number > RISING * best:
            break
    while True:
        near = [number for number in (best - 1, best + 1) if 1 <= number <= most and time_s(number) < time_s(best)]
        if not near:
            return best
        best = min(near, key=time_s)


def neighbourhood(best: float, most: int) -> tuple[int, ...]:
    """The numbers of slices worth trying around an estimate, ascending: 1 (no slices), the two integers about it, one
    more on either side, and others up to twice and down to half of it; none above `most`."""
    best = min(best, float(most))
    low = math.floor(best)
    near = {low - 1, low, low + 1, math.ceil(best) + 1} | {round(best * share) for share in WIDE}
    return tuple(sorted({1} | {number for number in near if 1 <= number <= most}))
