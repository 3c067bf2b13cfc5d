"""Detect links that slow each other down when used together.

Three measurements: pairs of hosts at the same time, messages that leave or reach one host together, and hosts of a rack
that send to other racks at once. Pure, as `links.py` is: calls a `measure` function.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from pipefit.cluster.measured import HostUplink, PortSharing
from pipefit.profile.classes import merge_groups
from pipefit.profile.links import Games, Measure
from pipefit.profile.tournament import HostPair

SLOW_PAIR_REPEATS = 2
"""Number of repeated measurements of pairs that seem slow."""

SLOWER = 1.25
"""A pair slowed by this factor beside others shares a resource with them."""

MUCH = 0.75
"""A second attempt to fill a shared link counts only if its demand is at least this share of the first one's."""

TWO = 1.2
"""Two simultaneous messages that take this many times as long as the slower one alone share a port."""

Rates = Mapping[HostPair, float]
"""Bytes per second of each ordered pair alone."""


@dataclass(frozen=True, slots=True)
class CrowdMeasurement:
    """Ordered pairs that were measured alone, and beside other pairs of a round."""

    alone: Rates
    slowdown: Mapping[HostPair, float]
    "Time beside others over time alone."

    @property
    def is_disturbed(self) -> bool:
        """True if pairs that are measured at the same time slow each other down."""
        return max(self.slowdown.values(), default=1.0) > SLOWER

    def find_suspects(self) -> list[int]:
        """Return the hosts with a tenth or more of their outgoing messages slowed down beside others."""
        out: dict[int, list[bool]] = {}
        for (source, _), slower in self.slowdown.items():
            out.setdefault(source, []).append(slower > SLOWER)
        return sorted(host for host, slowed in out.items() if any(slowed) and 10 * sum(slowed) >= len(slowed))


def measure_crowd(games: Games, size: int, measure: Measure, *, sample: int = 0, seed: int = 0) -> CrowdMeasurement:
    """Measure every pair of `games` (`sample` pairs of each round, unless 0) alone and beside the other pairs of its
    round.

    Pairs that seem slow are measured twice more. The fastest of the repetitions counts: a disturbance only ever adds.
    """
    order = random.Random(seed)
    rounds = [_reverse_pairs(pairs, turned) for pairs in games if len(pairs) > 1 for turned in (False, True)]
    chosen = [order.sample(pairs, min(sample or len(pairs), len(pairs))) for pairs in rounds]
    beside: dict[HostPair, float] = {}
    alone: dict[HostPair, float] = {}
    for turn in range(1 + SLOW_PAIR_REPEATS):
        jobs: list[tuple[Sequence[HostPair], dict[HostPair, float]]] = []
        for pairs, selected in zip(rounds, chosen, strict=True):
            again = [pair for pair in selected if turn == 0 or beside.get(pair, 0.0) > SLOWER * alone.get(pair, np.inf)]
            jobs += [([pair], alone) for pair in again] + ([(pairs, beside)] if again else [])
        order.shuffle(jobs)
        for pairs, results in jobs:
            for pair, time_s in measure(pairs, size).round_trip_s.items():
                results[pair] = min(results.get(pair, np.inf), time_s)
    return CrowdMeasurement(
        {pair: size / time_s for pair, time_s in alone.items()},
        {pair: beside[pair] / time_s for pair, time_s in alone.items() if pair in beside},
    )


def find_racks(members: Sequence[int], found: CrowdMeasurement, size: int, measure: Measure) -> dict[int, int]:
    """Return the class of every member: hosts of one class share an uplink.

    Two suspects at a time send to other hosts, three times to different ones. If their joint rate is always below the
    sum of their rates alone, they share an uplink. Needs the rate of every pair alone.
    """
    tries: dict[HostPair, list[list[HostPair]]] = {}
    slow: set[HostPair] = set()
    for couple in itertools.combinations(found.find_suspects(), 2):
        tries[couple] = _choose_targets(*couple, members, found)
        if (
            tries[couple]
            and min(_joint_slowdown(pairs, found.alone, size, measure) for pairs in tries[couple]) > SLOWER
        ):
            slow.add(couple)
    joined = _slow_senders(tries, slow)
    joins, parts = (np.zeros((len(members), len(members)), dtype=np.int64) for _ in range(2))
    position = {member: index for index, member in enumerate(members)}
    for first, second in tries:
        matrix = joins if (first, second) in joined else parts
        matrix[position[first], position[second]] = matrix[position[second], position[first]] = 1
    return dict(zip(members, (int(label) for label in merge_groups(joins, parts)), strict=True))


def _slow_senders(tries: Mapping[HostPair, Sequence[Sequence[HostPair]]], slow: set[HostPair]) -> set[HostPair]:
    """Return the slow couples that share their own uplink, not their targets' downlink.

    A couple is sure if one of its target couples was not slow. A couple whose target couples were all slow is left out
    if one of these is sure.
    """

    def couples_with(couple: HostPair) -> list[HostPair]:
        return [(min(x, y), max(x, y)) for (_, x), (_, y) in tries[couple]]

    sure = {couple for couple in slow if any(to not in slow for to in couples_with(couple))}
    return {couple for couple in slow if couple in sure or not any(to in sure for to in couples_with(couple))}


def _choose_targets(one: int, other: int, members: Sequence[int], found: CrowdMeasurement) -> list[list[HostPair]]:
    """Return up to three pairs of links from two hosts to two others, over links that were slowed down.

    The fastest come first; pairs with a much lower demand are omitted.
    """

    def best_target(source: int, taken: set[int]) -> int | None:
        links = [(source, m) for m in members if m not in taken and found.slowdown.get((source, m), 1.0) > SLOWER]
        return max(links, key=lambda way: found.alone[way], default=(source, None))[1]

    result: list[list[HostPair]] = []
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


def _joint_slowdown(pairs: Sequence[HostPair], alone: Rates, size: int, measure: Measure) -> float:
    """Return the sum of the pairs' rates alone over the sum of their rates together."""
    reached = fsum(_joint_rates(pairs, size, 1, measure).values())
    return fsum(alone[pair] for pair in pairs) / reached if reached else 1.0


@dataclass(frozen=True, slots=True)
class HostTriple:
    """A host and two other hosts, to which it sends, and from which it receives, at once."""

    middle: int
    ends: tuple[int, int]


def choose_hubs(
    members: Sequence[int], rates: Rates, classes: Mapping[int, int] | None = None
) -> list[list[HostTriple]]:
    """Return every member once as a middle, with the two hosts to which its links are fastest.

    They are in its own class if that has at least three hosts. The result is grouped: triples of one group are disjoint
    and can be measured at the same time.
    """
    result: list[tuple[list[HostTriple], set[int]]] = []
    for middle in members:
        peers = [member for member in members if member != middle]
        classmates = [peer for peer in peers if classes is not None and classes[peer] == classes[middle]]
        classmates = classmates if len(classmates) >= 2 else []
        peers.sort(
            key=lambda peer: (
                bool(classmates) and peer not in classmates,
                -min(rates[middle, peer], rates[peer, middle]),
            )
        )
        for hubs_of, used in result:
            free = [peer for peer in peers if peer not in used]
            near = [peer for peer in free if not classmates or peer in classmates]
            if middle not in used and len(near) >= 2:
                hubs_of.append(HostTriple(middle, (near[0], near[1])))
                used |= {middle, near[0], near[1]}
                break
        else:
            result.append(([HostTriple(middle, (peers[0], peers[1]))], {middle, peers[0], peers[1]}))
    return [hubs_of for hubs_of, _ in result]


@dataclass(frozen=True, slots=True)
class PortLimits:
    """The joint rate of two messages through one host, in one direction."""

    bytes_per_s: float
    shared: bool


def measure_ports(
    groups: Sequence[Sequence[HostTriple]], rates: Rates, size: int, repeats: int, measure: Measure, *, seed: int = 0
) -> tuple[dict[int, PortLimits], dict[int, PortLimits]]:
    """Return the (out, in) limits of every hub: two messages at once against each alone, in shuffled order.

    Joint rates are scaled to the links' rates for large messages, because short messages gain from bursts.
    """
    ends = {hub.middle: hub.ends for hubs in groups for hub in hubs}
    order = random.Random(seed)
    jobs = [(group, turned, which) for group in groups for turned in (False, True) for which in ((0,), (1,), (0, 1))]
    times: dict[tuple[int, bool, tuple[int, ...]], list[float]] = {}
    for _ in range(repeats):
        order.shuffle(jobs)
        for hubs, turned, which in jobs:
            pairs = {hub.middle: _reverse_pairs([(hub.middle, hub.ends[i]) for i in which], turned) for hub in hubs}
            trip_s = measure([pair for ways_of in pairs.values() for pair in ways_of], size).round_trip_s
            for middle, hub_pairs in pairs.items():
                if all(pair in trip_s for pair in hub_pairs):
                    times.setdefault((middle, turned, which), []).append(max(trip_s[pair] for pair in hub_pairs))
    result: tuple[dict[int, PortLimits], dict[int, PortLimits]] = ({}, {})
    for (middle, turned, which), joint_s in times.items():
        if len(which) == 2 and (middle, turned, (0,)) in times and (middle, turned, (1,)) in times:
            alone_s = [min(times[middle, turned, (i,)]) for i in (0, 1)]
            pairs = _reverse_pairs([(middle, end) for end in ends[middle]], turned)
            scale = [rates[pair] * time_s / size for pair, time_s in zip(pairs, alone_s, strict=True)]
            result[turned][middle] = PortLimits(fsum(scale) * size / min(joint_s), min(joint_s) > TWO * max(alone_s))
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
    """Return the joint rate of each class's hosts, to and from hosts of other classes; only classes of several hosts
    count.

    With two classes only the smaller one counts, because a shared limit may belong to either.
    """
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
            host_names = tuple(names[host] for host in hosts)
            result.append(HostUplink(hosts=host_names, up_bytes_per_s=up, down_bytes_per_s=down))
    return result


def _class_limit(
    label: int, turned: bool, flows: Mapping[tuple[int, bool], Rates], classes: Mapping[int, int], rates: Rates
) -> float | None:
    """Return the joint rate of a class's flows in one direction, if the class limits them; else None.

    It does if some of them are slower than alone although the class at their other end carries more.
    """
    class_flows = flows[label, turned]
    far = {pair: classes[pair[0] if turned else pair[1]] for pair in class_flows}
    for far_class in set(far.values()):
        reached = fsum(rate for pair, rate in class_flows.items() if far[pair] == far_class)
        alone = fsum(rates[pair] for pair in class_flows if far[pair] == far_class)
        carries = fsum(flows[far_class, not turned].values()) if (far_class, not turned) in flows else float("inf")
        if reached * SLOWER < alone and reached * SLOWER < carries:
            return fsum(class_flows.values())
    return None


def _links_across(hosts: Sequence[int], classes: Mapping[int, int], rates: Rates, turned: bool) -> list[HostPair]:
    """Return a link from each host to (`turned`: from) a different host outside: its fastest, other classes in turn."""
    free = [member for member in classes if member not in hosts]
    used: dict[int, int] = {}
    pairs = []
    for host in hosts[: len(free)]:
        links = {peer: (peer, host) if turned else (host, peer) for peer in free}
        best = min(free, key=lambda peer: (used.get(classes[peer], 0), -rates[links[peer]]))
        used[classes[best]] = used.get(classes[best], 0) + 1
        free.remove(best)
        pairs.append(links[best])
    return pairs


def _joint_rates(pairs: Sequence[HostPair], size: int, repeats: int, measure: Measure) -> Rates:
    """Return bytes per second of simultaneous pairs, each by its fastest repetition."""
    best: dict[HostPair, float] = {}
    for _ in range(repeats):
        for pair, time_s in measure(pairs, size).round_trip_s.items():
            best[pair] = max(best.get(pair, 0.0), size / time_s)
    return best


def build_sharing(
    members: Sequence[int], found: tuple[dict[int, PortLimits], dict[int, PortLimits]], ways: Sequence[HostUplink]
) -> PortSharing:
    """Return the limits by host, in the form of the cluster file."""
    out, into = found
    return PortSharing(
        out_bytes_per_s=tuple(out[member].bytes_per_s for member in members),
        out_shared=tuple(out[member].shared for member in members),
        in_bytes_per_s=tuple(into[member].bytes_per_s for member in members),
        in_shared=tuple(into[member].shared for member in members),
        uplinks=tuple(ways),
    )


def _reverse_pairs(pairs: Sequence[HostPair], turned: bool) -> list[HostPair]:
    return [(b, a) if turned else (a, b) for a, b in pairs]
