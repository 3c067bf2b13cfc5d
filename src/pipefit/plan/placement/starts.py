"""Initial placements of the search: orders of the hosts, and tilings of ordered devices over the grid.

Hosts are ordered by name (as in the file), by a greedy chain of nearest neighbours, by average-linkage clustering, and
by the second eigenvector of the graph of their links; racks are the clusters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.cost.types import Array, Ints
from pipefit.plan.placement.eigen import symmetric_eigenvectors
from pipefit.plan.placement.links import TICK_S, LinkArrays
from pipefit.plan.placement.shape import PlacementShape

MIN_RACK_DISTANCE_RATIO = 1.3
"""Minimum ratio of the distance between racks to the distance within them."""

EQUAL_EIGENVALUE_RATIO = 1.1
"""Eigenvalues up to this many times the second one count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSet:
    """The units of moves: blocks of slots at one or two levels (a shard group, a host), and racks of devices."""

    levels: tuple[Ints, ...]
    "[block, slot] for every level, in the order of the pipelines."
    block_of: Ints
    "[level, slot]."
    racks: Ints
    "[rack, device]: racks of equal size; they are swapped."


def host_distance(links: LinkArrays, size_bytes: float) -> Array:
    """[H, H] seconds of a message of that size between two hosts, the mean of both directions."""
    matrix = links.per_byte[0] * size_bytes + links.latency[0] * TICK_S
    both: Array = (matrix + matrix.T) / 2
    np.fill_diagonal(both, 0.0)
    return both


def chain_order(distance: Array) -> list[int]:
    """Return a greedy chain: from an end of the shortest link, always to the nearest remaining host."""
    count = len(distance)
    far = distance + np.where(np.eye(count, dtype=np.bool_), np.inf, 0.0)
    host = int(np.argmin(far)) // count
    order, left = [host], np.ones(count, dtype=np.bool_)
    left[host] = False
    for _ in range(count - 1):
        host = int(np.where(left, far[host], np.inf).argmin())
        order.append(host)
        left[host] = False
    return order


def cluster_order(distance: Array) -> tuple[list[int], list[list[int]]]:
    """Return (hosts in the order of the leaves of an average-linkage tree, racks).

    Racks are the clusters before the merge whose distance grows most, by at least MIN_RACK_DISTANCE_RATIO; if there
    is no such merge, none.
    """
    from scipy.cluster.hierarchy import average, fcluster, leaves_list
    from scipy.spatial.distance import squareform

    count = len(distance)
    if count < 3:
        return list(range(count)), []
    tree = average(squareform(distance, checks=False))
    order = [int(leaf) for leaf in leaves_list(tree)]
    heights = np.maximum(tree[:, 2], 1e-30)
    ratio = heights[1:] / heights[:-1]
    merge = int(ratio.argmax())
    racks = count - 1 - merge
    if ratio[merge] < MIN_RACK_DISTANCE_RATIO or not 2 <= racks <= count // 2:
        return order, []
    names = fcluster(tree, racks, criterion="maxclust")
    return order, [[host for host in order if names[host] == name] for name in sorted(set(names.tolist()))]


def spectral_order(distance: Array) -> list[int]:
    """Return hosts by the second eigenvector of the Laplacian of the graph with weights 1 / distance (Fiedler 1973).

    If several eigenvalues are close to the second one, as for similar racks, any mixture of their vectors is as good,
    but may mix two racks. Then the mixture closest to the hosts' numbers is used.
    """
    weight = 1.0 / np.where(distance > 0, distance, np.inf)
    laplacian = np.diag(weight.sum(axis=1)) - weight
    values, vectors = symmetric_eigenvectors(laplacian)
    alike = vectors[:, 1 : max(2, int(np.searchsorted(values, EQUAL_EIGENVALUE_RATIO * values[1])))]
    if alike.shape[1] > 1:
        wanted = (alike * np.arange(len(distance))[:, None]).sum(axis=0)
        vector = (alike * wanted).sum(axis=1)
    else:
        vector = alike[:, 0] * np.sign(alike[np.abs(alike[:, 0]).argmax(), 0])
    return [int(host) for host in np.argsort(vector, kind="stable")]


def in_host_order(order: Sequence[int], links: LinkArrays) -> Ints:
    """Return all devices, host by host in that order."""
    by_host = np.argsort(links.host, kind="stable")
    start = np.searchsorted(links.host[by_host], np.arange(len(links.inside_latency) + 1))
    return np.concatenate([by_host[start[host] : start[host + 1]] for host in order])


def tile_shapes(shape: PlacementShape, per_host: int) -> Iterator[tuple[int, int]]:
    """Yield (replicas, lanes) of the tiles of the grid that fit a host's devices: from all replicas to all lanes."""
    units = max(1, per_host // shape.shards)
    for replicas in range(min(units, shape.replicas), 0, -1):
        lanes = units // replicas
        if units % replicas == 0 and shape.replicas % replicas == 0 and shape.lanes % lanes == 0:
            yield replicas, lanes


def tile_devices(devices: Ints, shape: PlacementShape, tile: tuple[int, int], lanes_first: bool) -> Ints:
    """Return [slot]: devices of ordered hosts over the grid, tile by tile; the remaining devices are idle.

    `lanes_first` fills all lanes of some replicas before the next replicas.
    """
    replicas, lanes = tile
    grid = np.arange(shape.slots).reshape(
        shape.lanes // lanes, lanes, shape.replicas // replicas, replicas, shape.shards
    )
    axes = (2, 0, 1, 3, 4) if lanes_first else (0, 2, 1, 3, 4)
    slots = grid.transpose(axes).reshape(-1)
    placed = np.array(devices, dtype=np.int64)
    placed[slots] = devices[: shape.slots]
    return placed


def block_moves(device: Ints, shape: PlacementShape, links: LinkArrays, racks: Sequence[Sequence[int]]) -> MoveSet:
    """Return the moves for a search that starts at this placement.

    Blocks are the shard groups and, if all hosts have the same number of devices, the slots of each host's devices.
    """
    levels = [_block_units(device, shape, links)]
    hosts = _host_blocks(device, links)
    if hosts is not None and len(hosts) > 1 and len(hosts[0]) > len(levels[0][0]) and len(device) % shape.shards == 0:
        levels.append(hosts)
    block_of = np.zeros((len(levels), len(device)), dtype=np.int64)
    for level, blocks in enumerate(levels):
        levels[level] = blocks[_pipeline_order(blocks, shape)]
        for number, slots in enumerate(levels[level]):
            block_of[level, slots] = number
    return MoveSet(levels=tuple(levels), block_of=block_of, racks=_rack_devices(racks, links))


def _block_units(device: Ints, shape: PlacementShape, links: LinkArrays) -> Ints:
    """[block, slot]: the shard groups, and equally large groups of idle devices of one host."""
    plan = np.arange(shape.slots).reshape(-1, shape.shards)
    idle = np.arange(shape.slots, len(device))
    if shape.shards == 1:
        return np.concatenate((plan, idle.reshape(-1, 1)))
    hosts = links.host[device[idle]]
    groups = []
    for host in sorted(set(hosts.tolist())):
        host_slots = idle[hosts == host]
        groups.append(host_slots[: len(host_slots) // shape.shards * shape.shards].reshape(-1, shape.shards))
    return np.concatenate((plan, *groups))


def _host_blocks(device: Ints, links: LinkArrays) -> Ints | None:
    """[host, slot]: the slots of each host's devices; None if hosts differ in size."""
    counts = np.bincount(links.host)
    if counts.min() != counts.max():
        return None
    return np.argsort(links.host[device], kind="stable").reshape(len(counts), -1)


def _pipeline_order(blocks: Ints, shape: PlacementShape) -> Ints:
    """Return the blocks by replica, then by lane, of their first slot; idle ones last."""
    first = blocks.min(axis=1)
    width = shape.replicas * shape.shards
    replica = np.where(first < shape.slots, first % width // shape.shards, shape.replicas)
    return np.lexsort((first, replica))


def _rack_devices(racks: Sequence[Sequence[int]], links: LinkArrays) -> Ints:
    """[rack, device] of the racks of the most frequent size, if all hosts have the same size."""
    devices = [np.flatnonzero(np.isin(links.host, list(rack))) for rack in racks]
    sizes = [len(rack_devices) for rack_devices in devices]
    common = max(set(sizes), key=lambda size: (sizes.count(size), size), default=0)
    equal = [rack_devices for rack_devices in devices if len(rack_devices) == common]
    if len(equal) < 2 or len(set(np.bincount(links.host).tolist())) > 1:
        return np.zeros((0, 0), dtype=np.int64)
    return np.stack(equal)
