"""Links and ports of a cluster, prepared and cached: one Network is built per search.

A message takes the link's latency plus bytes / bandwidth, or the time of the link's measured curve at its size.
Concurrent messages share the port that they leave through. Inside a host each device has its own port. Between hosts
the devices of a host share the port of their rail, unless the rail says otherwise or a profile measured the capacity of
ports and uplinks. This module does not depend on stages or plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipefit.cluster.measured import PortSharing
from pipefit.cluster.topology import SELF, device_count, has_alike_hosts, link_between, rail_index
from pipefit.cluster.types import Cluster, DeviceKind, Link, is_processor
from pipefit.cost.compute.curves import collective_factors, message_time_s, rail_message_time_s

Port = tuple[str, int, int]
"""("device", device, 0), ("host out" or "host in", host, rail), ("link", source x hosts + target, rail), or ("rack up"
or "rack down", uplink, rail)."""


OTHER_WAY = {"host out": "host in", "host in": "host out", "rack up": "rack down", "rack down": "rack up"}


def opposite_port(port: Port, hosts: int) -> Port:
    """Return the port of the reverse direction, on a cluster of `hosts` hosts.

    Inside a host the port itself is returned, because there is no separate reverse port.
    """
    name, number, rail = port
    if name == "link":
        return name, number % hosts * hosts + number // hosts, rail
    return OTHER_WAY.get(name, name), number, rail


@dataclass(frozen=True, slots=True)
class TransferTime:
    """The time of messages that start together."""

    whole_s: float
    "Seconds until the last message has arrived."
    port_s: float
    "Seconds of the busiest port, without the latency."


FREE = TransferTime(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RingTime:
    """The cost of one step of several concurrent rings, determined by the slowest hop."""

    hops: int
    "Number of devices of the longest ring."
    latency_s: float
    s_per_byte: float

    def pass_s(self, total_bytes: float) -> float:
        """Return the seconds of one pass (an all-gather or a reduce-scatter of `total_bytes`): hops - 1 steps of equal
        parts.

        Formula: (n - 1) (latency + bytes / (n bandwidth)); Thakur, Rabenseifner and Gropp 2005, ring algorithm.
        """
        if self.hops <= 1:
            return 0.0
        return (self.hops - 1) * (self.latency_s + total_bytes / self.hops * self.s_per_byte)


class Network:
    """The links of one cluster, with cached results."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        count = device_count(cluster)
        self.devices = count
        self.host = tuple(number for number, host in enumerate(cluster.hosts) for _ in range(host.devices))
        self.rail = tuple(rail_index(cluster, device) if cluster.rails else 0 for device in range(count))
        self.kinds: tuple[DeviceKind, ...] = tuple(cluster.kinds[cluster.hosts[host].kind] for host in self.host)
        self._links: dict[tuple[int, int, int], Link] = {}
        self._alone: dict[tuple[int, int, int, float], TransferTime] = {}
        "Times of single messages, by hosts, rail and bytes."
        self._rings: dict[tuple[tuple[int, ...], ...], RingTime] = {}
        self._ring_of_class: dict[tuple[int, str], tuple[int, ...]] = {}
        "The ring inside a host that stands for all rings of a size on hosts with this link."
        self._representatives: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.ways: dict[object, tuple[Any, ...]] = {}
        "Possible levels of the rings of a collective: see `cost/comm/collectives.py`."
        self.hops: dict[object, tuple[float, list[tuple[Port, float]]]] = {}
        "Port loads of collectives per byte: see `cost/pipeline/contention.py`."
        self._factors: dict[tuple[str, int, bool], tuple[float, float]] = {}

    @cached_property
    def over_gloo(self) -> bool:
        """Return whether processes communicate over gloo: the devices are processors, by their kind or by the
        measurement.
        """
        known = self.cluster.provenance.environment
        measured = self.cluster.measured is not None and "cpu" in known and "device" not in known
        return measured or all(map(is_processor, self.kinds))

    def find_link(self, source: int, target: int) -> Link:
        """Return the link from one device to another."""
        if source == target:
            return SELF
        key = (self.host[source], self.host[target], self.rail[source])
        if key not in self._links:
            self._links[key] = link_between(self.cluster, source, target)
        return self._links[key]

    def transfer_time(self, messages: Sequence[tuple[int, int, float]]) -> TransferTime:
        """Return the time of messages (source, target, bytes) that start together. Messages to oneself are free."""
        if len(messages) != 1:
            return self._concurrent_time(messages)
        source, target, size = messages[0]
        if source == target:
            return FREE
        key = (self.host[source], self.host[target], self.rail[source], size)
        if key not in self._alone:
            self._alone[key] = self._concurrent_time(messages)
        return self._alone[key]

    def _concurrent_time(self, messages: Sequence[tuple[int, int, float]]) -> TransferTime:
        busy: dict[Port, float] = defaultdict(float)
        latency_s = 0.0
        for source, target, size in messages:
            link = self.find_link(source, target)
            if link is SELF or size == 0:
                continue
            latency_s = max(latency_s, link.latency_s)
            for port, seconds in self.port_loads(source, target, size, self.busy_s(source, target, size)):
                busy[port] += seconds
        port_s = max(busy.values(), default=0.0)
        return TransferTime(latency_s + port_s, port_s)

    def ring_time(self, rings: Sequence[Sequence[int]], backwards: bool = False) -> RingTime:
        """Return one step of concurrent rings.

        Each ring goes through its devices in ascending order, host by host, or in descending order with `backwards`.
        """
        key = tuple(tuple(sorted(ring, reverse=backwards)) for ring in rings if len(ring) > 1)
        if key not in self._rings:
            self._rings[key] = self._ring_time(key)
        return self._rings[key]

    def collective_factors(self, operation: str, size: int, inside: bool = False) -> tuple[float, float]:
        """Return the measured factors of the latency and the seconds per byte of a ring of `size` devices.

        Rings that stay inside hosts (`inside`) use measurements inside a host, other rings those between hosts. The
        nearest measured size counts.
        """
        key = (operation, size, inside)
        if key not in self._factors:
            measured = self.cluster.measured
            if self.over_gloo and operation == "reduce_scatter" and not self.was_measured(operation):
                self._factors[key] = 2.0, 2.0  # PyTorch's gloo backend implements it by an all-reduce
            else:
                self._factors[key] = (
                    collective_factors(measured, operation, self.host, size, inside) if measured else (1.0, 1.0)
                )
        return self._factors[key]

    def was_measured(self, operation: str) -> bool:
        """Return whether `pipefit profile` measured this collective."""
        measured = self.cluster.measured
        return measured is not None and any(curve.operation == operation for curve in measured.collectives)

    def port_between(self, source: int, target: int) -> Port:
        """Return the port that serialises messages: the link between two hosts, or between two devices of one host."""
        a, b = self.host[source], self.host[target]
        if a == b:
            return ("device", source, target)
        return ("link", a * len(self.cluster.hosts) + b, self.rail[source])

    def stays_in_hosts(self, rings: Sequence[Sequence[int]]) -> bool:
        """Return whether each of these groups lies on one host."""
        return all(len({self.host[device] for device in ring}) == 1 for ring in rings)

    def representative_rings(self, rings: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """Return rings with equal collective times, the same ones for equal classes.

        Rings inside hosts use separate ports, so their times depend only on their sizes and the links of their hosts.
        Other rings are returned unchanged.
        """
        if not self.stays_in_hosts(rings):
            return rings
        classes = dict.fromkeys((len(ring), self.cluster.hosts[self.host[ring[0]]].link, ring) for ring in rings)
        return tuple(dict.fromkeys(self._ring_of_class.setdefault((size, link), ring) for size, link, ring in classes))

    @cached_property
    def has_equal_hosts(self) -> bool:
        """Return whether all hosts and all links between them are alike, so that costs do not depend on which hosts a
        group has. False for measured clusters."""
        cluster = self.cluster
        if cluster.measured is not None or not has_alike_hosts(cluster):
            return False
        between = ~np.eye(len(cluster.hosts), dtype=bool)
        matrices = [
            matrix
            for rail in cluster.rails
            for matrix in (rail.latency_s, rail.bandwidth_bytes_per_s, rail.repeatability)
            if matrix
        ]
        return all(len(np.unique(np.array(matrix)[between])) <= 1 for matrix in matrices)

    def representative_devices(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the devices with equal costs on the first hosts, in the same order; unchanged unless all hosts are
        alike."""
        if not self.has_equal_hosts:
            return devices
        if devices not in self._representatives:
            size = self.cluster.hosts[0].devices
            numbers = {host: number for number, host in enumerate(sorted({self.host[device] for device in devices}))}
            self._representatives[devices] = tuple(
                numbers[self.host[device]] * size + device % size for device in devices
            )
        return self._representatives[devices]

    def _ring_time(self, rings: tuple[tuple[int, ...], ...]) -> RingTime:
        load: dict[Port, float] = defaultdict(float)
        latency_s = 0.0
        for ring in rings:
            for source, target in zip(ring, (*ring[1:], ring[0]), strict=True):
                link = self.find_link(source, target)
                latency_s = max(latency_s, link.latency_s)
                for port, seconds in self.port_loads(source, target, 1.0, 1.0 / link.bandwidth_bytes_per_s):
                    load[port] += seconds
        return RingTime(max(map(len, rings), default=1), latency_s, max(load.values(), default=0.0))

    def busy_s(self, source: int, target: int, size: float) -> float:
        """Return the seconds that a message occupies its port, without the latency.

        They come from the measured curve of the link, because bandwidth depends on the size; else from bytes /
        bandwidth.
        """
        link = self.find_link(source, target)
        whole_s = self._measured_s(source, target, size)
        return size / link.bandwidth_bytes_per_s if whole_s is None else max(0.0, whole_s - link.latency_s)

    def _measured_s(self, source: int, target: int, size: float) -> float | None:
        measured = self.cluster.measured
        if measured is None:
            return None
        a, b = self.host[source], self.host[target]
        if a == b:
            inside = measured.links.get(self.cluster.hosts[a].link)
            return None if inside is None else message_time_s(inside, size)
        between = measured.rails.get(self.cluster.rails[self.rail[source]].name)
        return None if between is None else rail_message_time_s(between, a, b, size)

    def port_loads(self, source: int, target: int, size: float, link_s: float) -> list[tuple[Port, float]]:
        """Return the ports that a message loads, with the seconds of each; `link_s` is its time on its link alone.

        If `pipefit profile` measured shared capacities, these are the link itself, and the ports and uplinks that carry
        less than the sum of their links. Otherwise they are the ports of both hosts, each as fast as the link.
        """
        a, b = self.host[source], self.host[target]
        if a == b:
            return [(("device", source, 0), link_s)]
        rail = self.rail[source]
        shared = self._shared_rail(rail)
        if shared is None:
            if not self.cluster.rails[rail].shared_ports:
                return [(("device", source, 1), link_s)]
            return [(("host out", a, rail), link_s), (("host in", b, rail), link_s)]
        loads: list[tuple[Port, float]] = [(("link", a * len(self.cluster.hosts) + b, rail), link_s)]
        if shared.out_shared[a]:
            loads.append((("host out", a, rail), size / shared.out_bytes_per_s[a]))
        if shared.in_shared[b]:
            loads.append((("host in", b, rail), size / shared.in_bytes_per_s[b]))
        names = self.cluster.hosts[a].name, self.cluster.hosts[b].name
        for number, uplink in enumerate(shared.uplinks):
            from_here, to_here = (name in uplink.hosts for name in names)
            if from_here and not to_here and uplink.up_bytes_per_s:
                loads.append((("rack up", number, rail), size / uplink.up_bytes_per_s))
            if to_here and not from_here and uplink.down_bytes_per_s:
                loads.append((("rack down", number, rail), size / uplink.down_bytes_per_s))
        return loads

    def _shared_rail(self, rail: int) -> PortSharing | None:
        measured = self.cluster.measured
        curve = measured.rails.get(self.cluster.rails[rail].name) if measured is not None else None
        return None if curve is None else curve.sharing
