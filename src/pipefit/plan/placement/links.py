"""The links of a cluster as arrays for a compiled search: the same times as `cost.network.Network` returns.

Times are integer ticks of a picosecond, so that sums do not depend on their order. A tick is far below the resolution
of any measurement, and 2^63 of them are 106 days.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipefit.cluster.types import Cluster, Rail
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import message_time_s
from pipefit.cost.types import Array
from pipefit.cost.types import Ints as Ints

TICK_S = 1e-12

EQUAL_LINK_TOLERANCE = 0.01
"""Links whose values differ by less than this fraction of the largest count as equal: no measurement repeats better."""


class LinkArrays(NamedTuple):
    """Links of one cluster, for messages of a few known sizes. Axes: Z sizes, M distinct matrices, H hosts."""

    host: Ints
    "[device]."
    rail: Ints
    "[device]: the rail it sends on."
    matrix: Ints
    "[rail]: index of its matrix among the M; rails with equal values share one."
    shared: Ints
    "[rail]: 1 if the devices of a host share the host's port."
    rails: int
    single: int
    "1 if every host has one device: then no two messages of a transfer share a port."
    latency: Ints
    "[M, H, H] ticks from host to host."
    per_byte: Array
    "[M, H, H] seconds per byte."
    busy: Ints
    "[Z, M, H, H] ticks for which a message of that size occupies its ports."
    inside_latency: Ints
    "[H] ticks between devices of one host."
    inside_per_byte: Array
    inside_busy: Ints
    "[Z, H]."


def to_ticks(seconds: float) -> int:
    """Return seconds as integer ticks."""
    return round(seconds / TICK_S)


def link_arrays(network: Network, sizes: Sequence[float]) -> LinkArrays:
    """Return the links between all devices, for messages of these sizes in bytes."""
    cluster = network.cluster
    hosts, rails = len(cluster.hosts), cluster.rails
    distinct: list[Rail] = []
    matrix = []
    for rail in rails:
        known = [i for i, known_rail in enumerate(distinct) if _same_figures(cluster, rail, known_rail)]
        matrix.append(known[0] if known else len(distinct))
        if not known:
            distinct.append(rail)
    latency_s = _stack_matrices([np.array(rail.latency_s, dtype=np.float64) for rail in distinct], hosts)
    bandwidth = _stack_matrices([np.array(rail.bandwidth_bytes_per_s, dtype=np.float64) for rail in distinct], hosts)
    inside = [cluster.links.get(host.link) for host in cluster.hosts]
    inside_latency_s = np.array([link.latency_s if link else 0.0 for link in inside])
    inside_bandwidth = np.array([link.bandwidth_bytes_per_s if link else np.inf for link in inside])
    with np.errstate(divide="ignore"):
        per_byte = np.where(bandwidth > 0, 1.0 / bandwidth, 0.0)  # the diagonal is not read
    busy = [_rail_busy_s(cluster, distinct, latency_s, per_byte, size) for size in sizes]
    inside_busy = [_inside_busy_s(cluster, inside_latency_s, inside_bandwidth, size) for size in sizes]
    return LinkArrays(
        host=np.array(network.host, dtype=np.int64),
        rail=np.array(network.rail, dtype=np.int64),
        matrix=np.array(matrix or [0], dtype=np.int64),
        shared=np.array([rail.shared_ports for rail in rails] or [True], dtype=np.int64),
        rails=max(1, len(rails)),
        single=int(all(host.devices == 1 for host in cluster.hosts)),
        latency=_in_ticks(latency_s),
        per_byte=per_byte,
        busy=_in_ticks(np.stack(busy) if busy else np.zeros((0, *per_byte.shape))),
        inside_latency=_in_ticks(inside_latency_s),
        inside_per_byte=1.0 / inside_bandwidth,
        inside_busy=_in_ticks(np.stack(inside_busy) if inside_busy else np.zeros((0, hosts))),
    )


def links_differ(cluster: Cluster) -> bool:
    """Return whether the assignment of hosts can matter: some link or kind of device differs.

    Differences up to EQUAL_LINK_TOLERANCE do not count.     If False, all host orders cost the same.
    """
    if len(cluster.hosts) < 2:
        return False
    if len({host.kind for host in cluster.hosts}) > 1 or len({host.link for host in cluster.hosts}) > 1:
        return True
    if any(rail.latency_s != cluster.rails[0].latency_s for rail in cluster.rails[1:]):
        return True
    if any(rail.bandwidth_bytes_per_s != cluster.rails[0].bandwidth_bytes_per_s for rail in cluster.rails[1:]):
        return True
    measured = cluster.measured
    matrices = [matrix for rail in cluster.rails[:1] for matrix in (rail.latency_s, rail.bandwidth_bytes_per_s)]
    if measured is not None:
        matrices += [matrix for rail in measured.rails.values() for matrix in rail.time_s]
    return any(_is_uneven(np.array(matrix, dtype=np.float64)) for matrix in matrices)


def _is_uneven(matrix: Array) -> bool:
    values = matrix[~np.eye(len(matrix), dtype=np.bool_)]
    return bool(values.max() - values.min() > EQUAL_LINK_TOLERANCE * values.max())


def _same_figures(cluster: Cluster, one: Rail, other: Rail) -> bool:
    curves = cluster.measured.rails if cluster.measured is not None else {}
    return (
        one.latency_s == other.latency_s
        and one.bandwidth_bytes_per_s == other.bandwidth_bytes_per_s
        and curves.get(one.name) == curves.get(other.name)
    )


def _stack_matrices(matrices: Sequence[Array], hosts: int) -> Array:
    return np.stack(matrices) if matrices else np.zeros((1, hosts, hosts))


def _rail_busy_s(cluster: Cluster, rails: Sequence[Rail], latency_s: Array, per_byte: Array, size: float) -> Array:
    """[M, H, H] seconds without the latency, from the measured curve of the rail if there is one."""
    busy_s = size * per_byte
    for index, rail in enumerate(rails):
        curve = cluster.measured.rails.get(rail.name) if cluster.measured is not None else None
        if curve is not None:
            whole_s = _along_matrices(curve.sizes_bytes, np.array(curve.time_s, dtype=np.float64), size)
            busy_s[index] = np.maximum(0.0, whole_s - latency_s[index])
    return busy_s


def _inside_busy_s(cluster: Cluster, latency_s: Array, bandwidth: Array, size: float) -> Array:
    busy_s: Array = size / bandwidth
    if cluster.measured is not None:
        for index, host in enumerate(cluster.hosts):
            curve = cluster.measured.links.get(host.link)
            if curve is not None:
                busy_s[index] = max(0.0, message_time_s(curve, size) - float(latency_s[index]))
    return busy_s


def _along_matrices(sizes: Sequence[float], times_s: Array, size: float) -> Array:
    """Return `cost.curves.along_knots` for every entry of matrices [size, H, H] at once."""
    if len(sizes) == 1:
        at_single_size: Array = times_s[0] if size <= sizes[0] else times_s[0] * (size / sizes[0])
        return at_single_size
    upper = min(max(int(np.searchsorted(sizes, size)), 1), len(sizes) - 1)
    share = max(0.0, (size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1]))
    between: Array = times_s[upper - 1] + share * (times_s[upper] - times_s[upper - 1])
    return between


def _in_ticks(seconds: Array) -> Ints:
    return np.rint(seconds / TICK_S).astype(np.int64)
