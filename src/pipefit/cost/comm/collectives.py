"""Collectives on given device groups: flat rings over their links, or rings inside hosts and then between hosts.

The faster of the two counts; over gloo, which has rings only, always the flat rings. Several groups usually run the
same collective at the same time (the replicas of every shard position; the shard groups of every replica) and share
ports, so every function takes all of them. Sizes are the bytes of the full tensor on one device: the result of an
all-gather, the input of a reduce-scatter. If `pipefit profile` measured collectives, their factors relative to a plain
ring (`cost.curves.collective_factors`) multiply its constants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import fsum

from pipefit.cost.comm.network import Network, RingTime

Rings = Sequence[Sequence[int]]

RingTuples = tuple[tuple[int, ...], ...]
"""Rings that can be a key."""

RingLevels = Sequence[tuple[Rings, int, RingTime]]
"""The levels of one pass: their rings, the divisor of the tensor on each, and the time of one step."""


def all_gather_s(network: Network, rings: Rings, total_bytes: float) -> float:
    """Return the seconds until every device of every ring has all `total_bytes`."""
    return one_pass_s(network, "all_gather", rings, total_bytes)


def reduce_scatter_s(network: Network, rings: Rings, total_bytes: float) -> float:
    """Return the seconds until every device has its part of the sum: a reversed all-gather."""
    return one_pass_s(network, "reduce_scatter", rings, total_bytes)


def all_reduce_s(network: Network, rings: Rings, total_bytes: float) -> float:
    """Return the seconds until every device has the full sum: a reduce-scatter, then an all-gather.

    Between hosts, the devices of a host first reduce among themselves. Each then sums its part with its peers on the
    other hosts, and the parts are gathered inside the host.
    """
    return 2 * one_pass_s(network, "all_reduce", rings, total_bytes)


def one_pass_s(network: Network, operation: str, rings: Rings, total_bytes: float) -> float:
    """Return the seconds of one pass, flat or in two levels."""
    return _levels_s(_fastest_levels(network, operation, rings, total_bytes), total_bytes)


def pass_levels(network: Network, operation: str, rings: Rings, total_bytes: float) -> list[tuple[Rings, float]]:
    """Return (rings, bytes of the full tensor on each) of the consecutive levels of one pass.

    The levels are the flat rings, or rings inside hosts and rings between them, whichever is faster. An all-reduce
    is two passes.
    """
    return [
        (level_rings, total_bytes / parts)
        for level_rings, parts, _ in _fastest_levels(network, operation, rings, total_bytes)
    ]


def _fastest_levels(network: Network, operation: str, rings: Rings, total_bytes: float) -> RingLevels:
    """Return the fastest levels of one pass; terms independent of the bytes are cached per rings."""
    key = operation, tuple(map(tuple, rings))
    if key not in network.ways:
        network.ways[key] = tuple(
            [(level_rings, parts, _ring_time(network, operation, level_rings)) for level_rings, parts in levels]
            for levels in _level_choices(network, rings)
        )
    return min(network.ways[key], key=lambda levels: _levels_s(levels, total_bytes))


def _levels_s(way: RingLevels, total_bytes: float) -> float:
    return fsum(time.pass_s(total_bytes / parts) for _, parts, time in way)


def _level_choices(network: Network, rings: Rings) -> list[list[tuple[Rings, int]]]:
    """Return the flat rings and, if possible, the two levels, each level with its divisor of the tensor."""
    flat: list[tuple[Rings, int]] = [(rings, 1)]
    if network.over_gloo:
        return [flat]
    inside, between, parts = _two_levels(network, rings)
    if between is None or inside is None:
        return [flat]
    return [flat, [(between, parts), (inside, 1)]]


def ring_step(network: Network, operation: str, rings: Rings) -> RingTime:
    """Return one step of the rings of a collective.

    In gloo, sums go from each device to the preceding one, gathers to the following one (gloo/allreduce.cc,
    gloo/allgather.cc).
    """
    return network.ring_time(rings, backwards=runs_backwards(network, operation))


def runs_backwards(network: Network, operation: str) -> bool:
    """Return whether each device of a ring sends to the preceding one."""
    return network.over_gloo and operation in ("all_reduce", "reduce_scatter")


def _ring_time(network: Network, operation: str, rings: Rings) -> RingTime:
    ring = ring_step(network, operation, rings)
    latency, per_byte = network.collective_factors(operation, ring.hops, network.stays_in_hosts(rings))
    return RingTime(ring.hops, ring.latency_s * latency, ring.s_per_byte * per_byte)


def _two_levels(network: Network, rings: Rings) -> tuple[list[list[int]] | None, list[list[int]] | None, int]:
    """Return (rings inside hosts, rings between hosts, devices per host).

    The rings are None unless every group has the same number of devices, above 1, on each of several hosts.
    """
    inside: list[list[int]] = []
    between: list[list[int]] = []
    parts = 0
    for ring in rings:
        hosts: dict[int, list[int]] = defaultdict(list)
        for device in sorted(ring):
            hosts[network.host[device]].append(device)
        sizes = {len(devices) for devices in hosts.values()}
        if len(hosts) == 1 or len(sizes) != 1 or sizes == {1} or (parts and sizes != {parts}):
            return None, None, 0
        parts = sizes.pop()
        inside.extend(hosts.values())
        between.extend([devices[i] for devices in hosts.values()] for i in range(parts))
    return inside, between, parts
