"""Racks whose uplink carries nearly all that their hosts send: seen only when all hosts send and receive at once.

In the rounds of a tournament half of the hosts send, so an uplink for more than half of them slows nobody down. Here
every host sends to one other and receives from one: a shift of the hosts, another one in every round, in turn in the
order of their names (racks are often named in order, and then all of a rack send to others) and in a shuffled one.
Whoever is slower than alone passes through something that is full; hosts between which nobody is ever slower
are of one rack. Pure, as `links.py` is: asks a `measure` callable.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from pipefit.profile.classes import merge_groups
from pipefit.profile.links import Measure
from pipefit.profile.sharing import AGAIN, SLOWER, Rates
from pipefit.profile.tournament import Pair

LOOK, MOST = 6, 64
"""Rounds after which it is over where nobody was slower, and rounds at most."""

APART = 4
"""A pair that was slower counts as so many that were not: not every round fills an uplink, but only those can."""


def find_flooded(members: Sequence[int], alone: Rates, size: int, measure: Measure, *, seed: int = 0) -> dict[int, int]:
    """Class of every member, hosts of one class sharing a way out or in; empty where none share any. `alone`: what each
    ordered pair reaches by itself."""
    draw, count = random.Random(seed), len(members)
    orders = (list(members), draw.sample(list(members), count))
    place = {member: index for index, member in enumerate(members)}
    joins, parts = (np.zeros((count, count), dtype=np.int64) for _ in range(2))
    turns = [(order, shift) for order in orders for shift in range(1, count)]
    draw.shuffle(turns)
    for number, (order, shift) in enumerate(turns[:MOST]):
        if number == LOOK and not parts.any():
            break
        ways = [(order[i], order[(i + shift) % count]) for i in range(count)]
        for (a, b), slower in _measure_slowdown(ways, alone, size, measure).items():
            matrix = parts if slower > SLOWER else joins
            matrix[place[a], place[b]] = matrix[place[b], place[a]] = APART if slower > SLOWER else 1
    if not parts.any():
        return {}
    joins[parts > 0] = 0
    labels = merge_groups(joins, parts)
    several = np.bincount(labels).max() > 1
    return dict(zip(members, map(int, labels), strict=True)) if several else {}


def _measure_slowdown(ways: Sequence[Pair], alone: Rates, size: int, measure: Measure) -> Mapping[Pair, float]:
    """Time beside all others over time alone, of the ways that answered; the fastest repetition, where one seems
    slow."""
    best: dict[Pair, float] = {}
    for _ in range(1 + AGAIN):
        for way, time_s in measure(ways, size).round_trip_s.items():
            best[way] = min(best.get(way, np.inf), time_s * alone[way] / size)
        if max(best.values(), default=0.0) <= SLOWER:
            break
    return best
