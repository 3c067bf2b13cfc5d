"""Find racks whose uplink carries nearly the whole traffic of their hosts: visible only when all hosts send and receive
at once.

In the rounds of a tournament half of the hosts send, so an uplink for more than half of them slows no host down. Here
every host sends to one host and receives from another: a shift of the hosts, a different one in every round. Shifts
alternate between name order (racks are often named in order, and then a whole rack sends to other racks) and a shuffled
order. A pair that is slower than alone passes through a full link; hosts between which no pair is ever slower are in
one rack. Pure, as `links.py` is: calls a `measure` function.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from pipefit.profile.classes import merge_groups
from pipefit.profile.links import Measure
from pipefit.profile.sharing import SLOW_PAIR_REPEATS, SLOWER, Rates
from pipefit.profile.tournament import HostPair

LOOK, MOST = 6, 64
"""Rounds after which the search ends if no pair was slower, and the most rounds."""

SLOW_PAIR_WEIGHT = 4
"""A slow pair counts as much as this number of others: not every round fills an uplink, but only an uplink slows
pairs."""


def find_flooded(members: Sequence[int], alone: Rates, size: int, measure: Measure, *, seed: int = 0) -> dict[int, int]:
    """Return the class of every member; hosts of one class share an uplink or downlink. Empty if none is shared.

    `alone`: the rate of each ordered pair by itself.
    """
    draw, count = random.Random(seed), len(members)
    orders = (list(members), draw.sample(list(members), count))
    position = {member: index for index, member in enumerate(members)}
    joins, parts = (np.zeros((count, count), dtype=np.int64) for _ in range(2))
    turns = [(order, shift) for order in orders for shift in range(1, count)]
    draw.shuffle(turns)
    for number, (order, shift) in enumerate(turns[:MOST]):
        if number == LOOK and not parts.any():
            break
        pairs = [(order[i], order[(i + shift) % count]) for i in range(count)]
        for (a, b), slower in _measure_slowdown(pairs, alone, size, measure).items():
            matrix = parts if slower > SLOWER else joins
            matrix[position[a], position[b]] = matrix[position[b], position[a]] = (
                SLOW_PAIR_WEIGHT if slower > SLOWER else 1
            )
    if not parts.any():
        return {}
    joins[parts > 0] = 0
    labels = merge_groups(joins, parts)
    several = np.bincount(labels).max() > 1
    return dict(zip(members, map(int, labels), strict=True)) if several else {}


def _measure_slowdown(ways: Sequence[HostPair], alone: Rates, size: int, measure: Measure) -> Mapping[HostPair, float]:
    """Return time beside all others over time alone, of the pairs that answered; the fastest repetition, if one seems
    slow."""
    best: dict[HostPair, float] = {}
    for _ in range(1 + SLOW_PAIR_REPEATS):
        for pair, time_s in measure(ways, size).round_trip_s.items():
            best[pair] = min(best.get(pair, np.inf), time_s * alone[pair] / size)
        if max(best.values(), default=0.0) <= SLOWER:
            break
    return best
