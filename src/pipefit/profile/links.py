"""Measure links: a pure function of a `measure` callable, so that its tests need no network.

Disjoint pairs measure at the same time. Every repetition visits pairs, sizes and directions in a newly shuffled order
and combines pairs differently. In a published matrix of a healthy cluster, a third to a half of the apparent
differences between links came from the order of measurement. Every sample therefore records its simultaneous
measurements, so that `estimate.py` can separate the two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipefit.cost.types import Array
from pipefit.profile.tournament import HostPair


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """One measured message with its tiny answer."""

    source: int
    target: int
    size_bytes: int
    round_trip_s: float
    repeat: int
    job: int = -1
    "Samples with the same number were measured at the same time."


@dataclass(slots=True)
class RoundOutcome:
    """The results of one round of pairs."""

    round_trip_s: Mapping[HostPair, float]
    lost: Mapping[int, str] = field(default_factory=dict)
    "Lost members, and the symptom."


@dataclass(slots=True)
class LinkSurvey:
    """All samples, and the members lost on the way."""

    samples: list[LinkSample] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)


Measure = Callable[[Sequence[HostPair], int], RoundOutcome]
"""Measures ordered pairs (source, target) at the same time: seconds from sending `size` bytes until the tiny answer
arrives. All members call it with the same arguments."""


Games = Sequence[Sequence[HostPair]]
"""Rounds of disjoint pairs."""


def survey_pairs(
    games: Games | Callable[[int], Games],
    sizes: Sequence[int],
    repeats: int,
    measure: Measure,
    *,
    seed: int = 0,
    found: LinkSurvey | None = None,
    after_round: Callable[[int, int, LinkSurvey], None] = lambda done, total, survey: None,
) -> LinkSurvey:
    """Measure both directions of every pair at every size, `repeats` times.

    `games` are rounds of disjoint pairs, or a function from repetition to rounds. A lost member is left out from then
    on; its measurements stay. `found` is an existing survey to extend.
    """
    result = found if found is not None else LinkSurvey()
    order = random.Random(seed)
    rounds = [games(repeat) if callable(games) else games for repeat in range(repeats)]
    first = 1 + max((sample.job for sample in result.samples), default=-1)
    total, done = 2 * len(sizes) * sum(map(len, rounds)), 0
    for repeat, played in enumerate(rounds):
        jobs = [(pairs, size, turned) for pairs in played for size in sizes for turned in (False, True)]
        order.shuffle(jobs)
        for pairs, size, turned in jobs:
            directed = [(b, a) if turned else (a, b) for a, b in pairs if a not in result.lost and b not in result.lost]
            if directed:
                outcome = measure(directed, size)
                result.lost.update(outcome.lost)
                result.samples += [
                    LinkSample(
                        source=a, target=b, size_bytes=size, round_trip_s=time_s, repeat=repeat, job=first + done
                    )
                    for (a, b), time_s in sorted(outcome.round_trip_s.items())
                ]
            done += 1
            after_round(done, total, result)
    return result


def latency_and_bandwidth(sizes_bytes: Sequence[int], time_s: Sequence[float] | Array) -> tuple[float, float]:
    """Return (latency in s, bandwidth in bytes/s) of time = latency + size / bandwidth, from the smallest and the
    largest message.

    Messages between these sizes may use other protocols, or gain from bursts: curves record all sizes.
    """
    times = np.asarray(time_s, dtype=np.float64)
    least_s = float(times.max()) * 1e-6
    bytes_s = max(float(times[-1] - times[0]), least_s)
    bandwidth = (sizes_bytes[-1] - sizes_bytes[0]) / bytes_s
    return max(0.0, float(times[0]) - sizes_bytes[0] / bandwidth), bandwidth
