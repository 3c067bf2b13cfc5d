"""Queries on a cluster: the host, kind and links of a device. Devices are numbered host by host, from 0."""

from __future__ import annotations

import bisect
import itertools
from functools import lru_cache

from pipefit.cluster.types import Cluster, DeviceKind, Host, Link
from pipefit.errors import ClusterError

SELF = Link(latency_s=0.0, bandwidth_bytes_per_s=float("inf"))
"""The link of a device to itself: a local hand-over."""


def device_count(cluster: Cluster) -> int:
    """The number of devices on all hosts."""
    return sum(host.devices for host in cluster.hosts)


def host_index(cluster: Cluster, device: int) -> int:
    """The index of the host that holds `device`. Raises ClusterError for a device that does not exist."""
    stops = _device_stops(tuple(host.devices for host in cluster.hosts))
    if not 0 <= device < (stops[-1] if stops else 0):
        raise ClusterError(
            "The cluster has no such device.",
            where=f"cluster {cluster.name!r}",
            seen=device,
            allowed=f"0 to {device_count(cluster) - 1}",
        )
    return bisect.bisect_right(stops, device)


def host_of(cluster: Cluster, device: int) -> Host:
    """The host that holds `device`."""
    return cluster.hosts[host_index(cluster, device)]


def place_in_host(cluster: Cluster, device: int) -> int:
    """The position of `device` among the devices of its host."""
    index = host_index(cluster, device)
    stops = _device_stops(tuple(host.devices for host in cluster.hosts))
    return device - (stops[index - 1] if index else 0)


def kind_of(cluster: Cluster, device: int) -> DeviceKind:
    """The kind of `device`."""
    return cluster.kinds[host_of(cluster, device).kind]


def rail_index(cluster: Cluster, device: int) -> int:
    """The rail that a device sends on: devices of a host are assigned to rails round-robin."""
    return place_in_host(cluster, device) % len(cluster.rails)


def link_between(cluster: Cluster, source: int, target: int) -> Link:
    """The link from `source` to `target`: SELF, the host's link class, or the entry of the source's rail."""
    if source == target:
        return SELF
    a, b = host_index(cluster, source), host_index(cluster, target)
    if a == b:
        return cluster.links[cluster.hosts[a].link]
    if not cluster.rails:
        raise ClusterError(
            "The cluster has several hosts and no rail that joins them.",
            where=f"cluster {cluster.name!r}: rails",
            next_step="add a rail with latency_s and bandwidth_bytes_per_s matrices",
        )
    rail = cluster.rails[rail_index(cluster, source)]
    return Link(
        latency_s=rail.latency_s[a][b],
        bandwidth_bytes_per_s=rail.bandwidth_bytes_per_s[a][b],
        repeatability=rail.repeatability[a][b] if rail.repeatability else 1.0,
    )


def has_alike_hosts(cluster: Cluster) -> bool:
    """Return whether all hosts have the same kind and number of devices, and the same links between them."""
    return len({(host.kind, host.devices, host.link) for host in cluster.hosts}) == 1


@lru_cache(maxsize=64)
def _device_stops(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(counts))
