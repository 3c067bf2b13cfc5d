"""Do messages slow each other down? Pairs of hosts that are measured at the same time, messages that leave or reach one
host together, and hosts of a rack that send to others at once. Pure, as `links.py` is: asks a `measure` callable.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.cluster.measured import HostUplink, PortSharing
from pipefit.profile.classes import merge_groups
from pipefit.profile.links import Games, Measure
from pipefit.profile.tournament import Pair

AGAIN = 2
"""More measurements of what seems slow."""

SLOWER = 1.25
"""A pair that takes so many times longer beside others shares something with them."""

MUCH = 0.75
"""Of two tries to fill something, the second counts if it asks for so much of the first."""

TWO = 1.2
"""Two messages at once that take so many times as long as the slower one alone share a port."""

Rates = Mapping[Pair, float]
"""Bytes per second of each ordered pair alone."""


@dataclass(frozen=True, slots=True)
class CrowdMeasurement:
    """Ordered pairs that were measured alone, and beside the others of a round."""

    alone: Rates
    slowdown: Mapping[Pair, float]
    "Time beside others over time alone."

    @property
    def is_disturbed(self) -> bool:
        """Whether pairs that are measured at the same time slow each other down."""
        return max(self.slowdown.values(), default=1.0) > SLOWER

    def find_suspects(self) -> list[int]:
        """Hosts that a tenth of their messages to others leave more slowly beside others."""
        out: dict[int, list[bool]] = {}
        for (source, _), slower in self.slowdown.items():
            out.setdefault(source, []).append(slower > SLOWER)
        return sorted(host for host, slowed in out.items() if any(slowed) and 10 * sum(slowed) >= len(slowed))


def measure_crowd(games: Games, size: int, measure: Measure, *, sample: int = 0, seed: int = 0) -> CrowdMeasurement:
    """Every pair of `games` (of each round `sample`, if that is not 0) alone and beside the others of its round; what
    seems slow is measured twice more. The fastest of the repetitions counts: a disturbance only ever adds."""
    order = random.Random(seed)
    rounds = [_reverse_pairs(pairs, turned) for pairs in games if len(pairs) > 1 for turned in (False, True)]
    chosen = [order.sample(pairs, min(sample or len(pairs), len(pairs))) for pairs in rounds]
    beside: dict[Pair, float] = {}
    alone: dict[Pair, float] = {}
    for turn in range(1 + AGAIN):
        jobs: list[tuple[Sequence[Pair], dict[Pair, float]]] = []
        for pairs, own in zip(rounds, chosen, strict=True):
            again = [pair for pair in own if turn == 0 or beside.get(pair, 0.0) > SLOWER * alone.get(pair, np.inf)]
            jobs += [([pair], alone) for pair in again] + ([(pairs, beside)] if again else [])
        order.shuffle(jobs)
        for pairs, found in jobs:
            for pair, time_s in measure(pairs, size).round_trip_s.items():
                found[pair] = min(found.get(pair, np.inf), time_s)
    return CrowdMeasurement(
        {pair: size / time_s for pair, time_s in alone.items()},
        {pair: beside[pair] / time_s for pair, time_s in alone.items() if pair in beside},
    )


def find_racks(members: Sequence[int], found: CrowdMeasurement, size: int, measure: Measure) -> dict[int, int]:
    """Class of every member: hosts of one class share a way out. Two suspects at a time send to others, three
    times to other ones: if they always reach less than alone, they share. Needs every pair alone."""
    tries: dict[Pair, list[list[Pair]]] = {}
    slow: set[Pair] = set()
    for couple in itertools.combinations(found.find_suspects(), 2):
        tries[couple] = _choose_targets(*couple, members, found)
        if (
            tries[couple]
            and min(_joint_slowdown(pairs, found.alone, size, measure) for pairs in tries[couple]) > SLOWER
        ):
            slow.add(couple)
    joined = _slow_senders(tries, slow)
    joins, parts = (np.zeros((len(members), len(members)), dtype=np.int64) for _ in range(2))
    place = {member: index for index, member in enumerate(members)}
    for one, other in tries:
        matrix = joins if (one, other) in joined else parts
        matrix[place[one], place[other]] = matrix[place[other], place[one]] = 1
    return dict(zip(members, (int(label) for label in merge_groups(joins, parts)), strict=True))


def _slow_senders(tries: Mapping[Pair, Sequence[Sequence[Pair]]], slow: set[Pair]) -> set[Pair]:
    """Of couples that were slow together those that share themselves, not what they sent to: couples all of whose
    targets were slow couples too are left out where one of these is sure, having sent to some that were not."""

    def couples_with(couple: Pair) -> list[Pair]:
        return [(min(x, y), max(x, y)) for (_, x), (_, y) in tries[couple]]

    sure = {couple for couple in slow if any(to not in slow for to in couples_with(couple))}
    return {couple for couple in slow if couple in sure or not any(to in sure for to in couples_with(couple))}


def _choose_targets(one: int, other: int, members: Sequence[int], found: CrowdMeasurement) -> list[list[Pair]]:
    """Up to three ways in which two hosts send to two others, over links that others slowed down: the fastest first,
    and none that asks for much less than these."""

    def best_target(source: int, taken: set[int]) -> int | None:
        ways = [(source, m) for m in members if m not in taken and found.slowdown.get((source, m), 1.0) > SLOWER]
        return max(ways, key=lambda way: found.alone[way], default=(source, None))[1]

    result: list[list[Pair]] = []
    used, wanted = {one, other}, 0.0
    for _ in range(3):
        first = best_target(one, used)
        second = best_target(other, used | {first}) if first is not None else None
        if first is None or second is None:
            break
        used |= {first, second}
        rate = found.alone[one, first] + found.alone[other, second]
        if rate < MUCH * wanted:
            break
        wanted = max(wanted, rate)
        result.append([(one, first), (other, second)])
    return result


def _joint_slowdown(pairs: Sequence[Pair], alone: Rates, size: int, measure: Measure) -> float:
    """What pairs reach alone over what they reach together."""
    reached = sum(_joint_rates(pairs, size, 1, measure).values())
    return sum(alone[pair] for pair in pairs) / reached if reached else 1.0


@dataclass(frozen=True, slots=True)
class HostTriple:
    """A host and two others that it sends to, and receives from, at once."""

    middle: int
    ends: tuple[int, int]


def choose_hubs(
    members: Sequence[int], rates: Rates, classes: Mapping[int, int] | None = None
) -> list[list[HostTriple]]:
    """Every member once in the middle, with the two others whose links to it are the fastest and inside its class where
    that has three; in groups of disjoint ones, that can be measured at the same time."""
    result: list[tuple[list[HostTriple], set[int]]] = []
    for middle in members:
        others = [member for member in members if member != middle]
        own = [other for other in others if classes is not None and classes[other] == classes[middle]]
        own = own if len(own) >= 2 else []
        others.sort(
            key=lambda other: (bool(own) and other not in own, -min(rates[middle, other], rates[other, middle]))
        )
        for hubs_of, used in result:
            free = [other for other in others if other not in used]
            near = [other for other in free if not own or other in own]
            if middle not in used and len(near) >= 2:
                hubs_of.append(HostTriple(middle, (near[0], near[1])))
                used |= {middle, near[0], near[1]}
                break
        else:
            result.append(([HostTriple(middle, (others[0], others[1]))], {middle, others[0], others[1]}))
    return [hubs_of for hubs_of, _ in result]


@dataclass(frozen=True, slots=True)
class PortLimits:
    """What two messages at once reach through one host, one way."""

    bytes_per_s: float
    shared: bool


def measure_ports(
    groups: Sequence[Sequence[HostTriple]], rates: Rates, size: int, repeats: int, measure: Measure, *, seed: int = 0
) -> tuple[dict[int, PortLimits], dict[int, PortLimits]]:
    """(out, in) of every hub: two messages at the same time against each alone, in shuffled order. What they reach is
    counted in the links' rates for large messages: short ones gain by what the network lets through at once."""
    ends = {hub.middle: hub.ends for each in groups for hub in each}
    order = random.Random(seed)
    jobs = [(group, turned, which) for group in groups for turned in (False, True) for which in ((0,), (1,), (0, 1))]
    times: dict[tuple[int, bool, tuple[int, ...]], list[float]] = {}
    for _ in range(repeats):
        order.shuffle(jobs)
        for each, turned, which in jobs:
            ways = {hub.middle: _reverse_pairs([(hub.middle, hub.ends[i]) for i in which], turned) for hub in each}
            found = measure([way for ways_of in ways.values() for way in ways_of], size).round_trip_s
            for middle, own in ways.items():
                if all(way in found for way in own):
                    times.setdefault((middle, turned, which), []).append(max(found[way] for way in own))
    result: tuple[dict[int, PortLimits], dict[int, PortLimits]] = ({}, {})
    for (middle, turned, which), taken in times.items():
        if len(which) == 2 and (middle, turned, (0,)) in times and (middle, turned, (1,)) in times:
            alone_s = [min(times[middle, turned, (i,)]) for i in (0, 1)]
            ways = _reverse_pairs([(middle, end) for end in ends[middle]], turned)
            scale = [rates[way] * time_s / size for way, time_s in zip(ways, alone_s, strict=True)]
            result[turned][middle] = PortLimits(sum(scale) * size / min(taken), min(taken) > TWO * max(alone_s))
    return result


def measure_uplinks(
    members: Sequence[int],
    classes: Mapping[int, int],
    names: Mapping[int, str],
    rates: Rates,
    size: int,
    repeats: int,
    measure: Measure,
) -> list[HostUplink]:
    """What the hosts of each class of several reach together, towards and from hosts of other classes. With two classes
    only the smaller one counts: what they share may be either's."""
    groups: dict[int, list[int]] = {}
    for member in members:
        groups.setdefault(classes[member], []).append(member)
    wanted = {label: hosts for label, hosts in groups.items() if 1 < len(hosts) < len(members)}
    if len(groups) == 2 and len(wanted) == 2:
        smaller = min(wanted, key=lambda label: len(wanted[label]))
        wanted = {smaller: wanted[smaller]}
    flows: dict[tuple[int, bool], Rates] = {}
    for label, hosts in wanted.items():
        for turned in (False, True):
            flows[label, turned] = _joint_rates(_links_across(hosts, classes, rates, turned), size, repeats, measure)
    result = []
    for label, hosts in wanted.items():
        up, down = (_class_limit(label, turned, flows, classes, rates) for turned in (False, True))
        if up is not None or down is not None:
            own = tuple(names[host] for host in hosts)
            result.append(HostUplink(hosts=own, up_bytes_per_s=up, down_bytes_per_s=down))
    return result


def _class_limit(
    label: int, turned: bool, flows: Mapping[tuple[int, bool], Rates], classes: Mapping[int, int], rates: Rates
) -> float | None:
    """What a class's flows one way reach together, if some of them are slower than alone although the other class at
    their other end carries more; else None: what slows them is the other's."""
    own = flows[label, turned]
    far = {pair: classes[pair[0] if turned else pair[1]] for pair in own}
    for other in set(far.values()):
        reached = sum(rate for pair, rate in own.items() if far[pair] == other)
        alone = sum(rates[pair] for pair in own if far[pair] == other)
        carries = sum(flows[other, not turned].values()) if (other, not turned) in flows else float("inf")
        if reached * SLOWER < alone and reached * SLOWER < carries:
            return sum(own.values())
    return None


def _links_across(hosts: Sequence[int], classes: Mapping[int, int], rates: Rates, turned: bool) -> list[Pair]:
    """Each host to (`turned`: from) another outside, over its fastest link, the other classes in turn."""
    free = [member for member in classes if member not in hosts]
    used: dict[int, int] = {}
    pairs = []
    for host in hosts[: len(free)]:
        ways = {other: (other, host) if turned else (host, other) for other in free}
        best = min(free, key=lambda other: (used.get(classes[other], 0), -rates[ways[other]]))
        used[classes[best]] = used.get(classes[best], 0) + 1
        free.remove(best)
        pairs.append(ways[best])
    return pairs


def _joint_rates(pairs: Sequence[Pair], size: int, repeats: int, measure: Measure) -> Rates:
    """Bytes per second of pairs at once, each by its fastest repetition."""
    best: dict[Pair, float] = {}
    for _ in range(repeats):
        for pair, time_s in measure(pairs, size).round_trip_s.items():
            best[pair] = max(best.get(pair, 0.0), size / time_s)
    return best


def build_sharing(
    members: Sequence[int], found: tuple[dict[int, PortLimits], dict[int, PortLimits]], ways: Sequence[HostUplink]
) -> PortSharing:
    """As the cluster file has it, by host."""
    out, into = found
    return PortSharing(
        out_bytes_per_s=tuple(out[member].bytes_per_s for member in members),
        out_shared=tuple(out[member].shared for member in members),
        in_bytes_per_s=tuple(into[member].bytes_per_s for member in members),
        in_shared=tuple(into[member].shared for member in members),
        uplinks=tuple(ways),
    )


def _reverse_pairs(pairs: Sequence[Pair], turned: bool) -> list[Pair]:
    return [(b, a) if turned else (a, b) for a, b in pairs]
