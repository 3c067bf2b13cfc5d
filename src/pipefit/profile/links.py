"""Measuring links: a pure function of a `measure` callable, so that its tests need no network.

Disjoint pairs measure at the same time; every repetition goes through pairs, sizes and directions in a freshly
shuffled order. Half of what looked like slow links in a published matrix of a healthy cluster was the order in which
they had been measured; shuffling turns that into visible spread instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipefit.profile.tournament import Pair

Array = NDArray[np.float64]

TINY = 8
"""Bytes of the answer to every message, and of the smallest message: its round trip is two latencies."""

SIZES = (TINY, 16 * 2**10, 256 * 2**10, 2 * 2**20, 16 * 2**20)
"""Sizes in bytes of the messages that are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """One measured message with its tiny answer."""

    source: int
    target: int
    size_bytes: int
    round_trip_s: float
    repeat: int


@dataclass(slots=True)
class Outcome:
    """What one round of pairs gave."""

    round_trip_s: Mapping[Pair, float]
    lost: Mapping[int, str] = field(default_factory=dict)
    "Members that are gone, and how it showed."


@dataclass(slots=True)
class LinkSurvey:
    """Everything that was measured, and who was lost on the way."""

    samples: list[LinkSample] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)


Measure = Callable[[Sequence[Pair], int], Outcome]
"""Measures ordered pairs (source, target) at the same time: seconds from sending `size` bytes until the tiny answer
is back. All members call it with the same arguments."""


def survey(
    games: Sequence[Sequence[Pair]],
    sizes: Sequence[int],
    repeats: int,
    measure: Measure,
    *,
    seed: int = 0,
    found: LinkSurvey | None = None,
    after_round: Callable[[int, int, LinkSurvey], None] = lambda done, total, survey: None,
) -> LinkSurvey:
    """Measure both directions of every pair at every size, `repeats` times. `games` are rounds of disjoint pairs.

    A member that is lost is left out from then on; what was measured stays. `found` may be given to look on.
    """
    result = found if found is not None else LinkSurvey()
    order = random.Random(seed)
    total = repeats * len(games) * len(sizes) * 2
    done = 0
    for repeat in range(repeats):
        jobs = [(pairs, size, turned) for pairs in games for size in sizes for turned in (False, True)]
        order.shuffle(jobs)
        for pairs, size, turned in jobs:
            ways = [(b, a) if turned else (a, b) for a, b in pairs if a not in result.lost and b not in result.lost]
            if ways:
                outcome = measure(ways, size)
                result.lost.update(outcome.lost)
                result.samples += [
                    LinkSample(source=a, target=b, size_bytes=size, round_trip_s=time_s, repeat=repeat)
                    for (a, b), time_s in sorted(outcome.round_trip_s.items())
                ]
            done += 1
            after_round(done, total, result)
    return result


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Times of one message from each member to each other: arrays [size, source, target]; NaN where not known."""

    members: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    time_s: Array
    "The fastest repetition: a disturbance only ever adds."
    spread: Array
    "(slowest - fastest repetition) / fastest."
    repeatability: Array
    "[source, target], of the largest size: the part of the differences between links that comes back when measured "
    "again."


def pair_times(samples: Sequence[LinkSample], members: Sequence[int]) -> PairTimes:
    """One-way times: the round trip less half of the link's tiny round trip (for the tiny message: half of it)."""
    place = {member: index for index, member in enumerate(members)}
    sizes = sorted({sample.size_bytes for sample in samples} | {TINY})
    repeats = 1 + max((sample.repeat for sample in samples), default=0)
    trips = np.full((repeats, len(sizes), len(members), len(members)), np.nan)
    for sample in samples:
        if sample.source in place and sample.target in place:
            where = (sample.repeat, sizes.index(sample.size_bytes), place[sample.source], place[sample.target])
            trips[where] = sample.round_trip_s
    tiny = sizes.index(TINY)
    back_s = _extreme(trips[:, tiny], np.fmin) / 2
    one_way = trips - back_s
    one_way[:, tiny] = trips[:, tiny] / 2
    one_way = np.maximum(one_way, np.where(np.isnan(one_way), np.nan, back_s))
    fastest = _extreme(one_way, np.fmin)
    spread = (_extreme(one_way, np.fmax) - fastest) / fastest
    return PairTimes(tuple(members), tuple(sizes), fastest, spread, repeatability(one_way[:, -1]))


def repeatability(times: Array) -> Array:
    """Per link, from times [repeat, source, target]: variance between links over (variance between links + variance
    of this link's repetitions), of the logarithms: the intraclass correlation of one measurement.

    1: the link differs from the others by what was measured; 0: the differences are noise. 1 where there are fewer
    than three links or one repetition, which cannot tell.
    """
    logs = np.log(times)
    known = ~np.isnan(logs).any(axis=0)
    if known.sum() < 3 or len(times) < 2:
        return np.ones(times.shape[1:])
    within = np.var(logs, axis=0, ddof=1)
    noise = float(within[known].mean())
    between = max(0.0, float(np.var(logs.mean(axis=0)[known], ddof=1)) - noise / len(times))
    total = between + within
    return np.where(known & (total > 0), between / np.where(total > 0, total, 1.0), 1.0)


def latency_and_bandwidth(sizes_bytes: Sequence[int], time_s: Sequence[float] | Array) -> tuple[float, float]:
    """(latency in s, bandwidth in bytes/s) of time = latency + size / bandwidth, by least squares on relative errors.

    Small messages go by other ways than large ones, so the line passes between; curves keep the sizes apart.
    """
    from scipy.optimize import nnls

    times = np.asarray(time_s, dtype=np.float64)
    sizes = np.asarray(sizes_bytes, dtype=np.float64)
    scale = sizes.max()
    matrix = np.stack([np.ones_like(times), sizes / scale], axis=-1) / times[:, None]
    latency_s, whole_s = nnls(matrix, np.ones(len(times)))[0]
    slowest = times.max() * 1e-6
    return float(latency_s), float(scale / max(whole_s, slowest))


def _extreme(values: Array, pick: np.ufunc) -> Array:
    return np.asarray(pick.reduce(values, axis=0))
