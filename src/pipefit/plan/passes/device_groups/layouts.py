"""Layouts of device groups: lanes of groups, each group a shard axis, with groups of different sizes.

On few devices every way to cut a row of them into groups is tried, for any order of the hosts, with and without the
devices of a kind. On many, equal blocks inside hosts make grids of lanes and replicas; all devices of a kind, and all
devices together, form groups up to a size limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from pipefit.cost.comm.network import Network
from pipefit.plan.passes.device_groups.group_budget import GROUP_BUDGET

Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Devices in groups: [lane][replica]; the groups of a lane have equal sizes, each in rising order."""

    lanes: tuple[tuple[Devices, ...], ...]

    @property
    def replica_count(self) -> int:
        return len(self.lanes[0])

    @property
    def device_order(self) -> Devices:
        """The devices by lane, replica and shard, as in `ParallelConfig.devices`."""
        return tuple(device for lane in self.lanes for group in lane for device in group)

    @property
    def is_grouped(self) -> bool:
        """True if some group has more than one device."""
        return any(len(group) > 1 for lane in self.lanes for group in lane)


def iter_layouts(network: Network, batch: int, most_lanes: int, devices: int | None = None) -> Iterator[GroupLayout]:
    """Yield layouts worth evaluating, each once: at most `most_lanes` lanes, and no more replicas than the batch has
    rows.

    With `devices`, exactly this number of devices is used.
    """
    seen: set[object] = set()
    few = network.devices <= GROUP_BUDGET.exhaustive_devices
    for layout in _row_cuts(network) if few else _block_layouts(network, batch, most_lanes):
        key = frozenset(layout.lanes)
        able = layout.is_grouped and len(layout.lanes) <= most_lanes and layout.replica_count <= batch
        if able and key not in seen and devices in (None, len(layout.device_order)):
            seen.add(key)
            yield layout


def reorder_lanes(network: Network, layout: GroupLayout) -> Iterator[GroupLayout]:
    """Yield a layout with its lanes in other orders, reversed first; orders with the same sequence of kinds count once.

    The order matters: earlier lanes hold more activations, and first and last layers are unlike the rest.
    """
    lanes, seen = layout.lanes, set[object]()
    permuted = itertools.islice(itertools.permutations(lanes), 1, GROUP_BUDGET.examined_lane_orders)
    for order in (lanes, lanes[::-1], *permuted):
        key = tuple(tuple(network.kinds[device].name for group in lane for device in group) for lane in order)
        if key not in seen and order is not lanes and len(seen) <= GROUP_BUDGET.lane_orders:
            yield GroupLayout(order)
        seen.add(key)


def _row_cuts(network: Network) -> Iterator[GroupLayout]:
    """Yield every cut of every row of devices into groups, one a lane; and equal neighbours of a cut as replicas."""
    for row in _device_rows(network):
        for count in range(1, len(row) + 1):
            for inner in itertools.combinations(range(1, len(row)), count - 1):
                stops = (*inner, len(row))
                groups = [tuple(sorted(row[a:b])) for a, b in zip((0, *inner), stops, strict=True)]
                yield GroupLayout(tuple((group,) for group in groups))
                for replicas in range(2, len(groups) + 1):
                    if len(groups) % replicas == 0:
                        yield from _with_replicas(groups, replicas)


def _with_replicas(groups: Sequence[Devices], replicas: int) -> Iterator[GroupLayout]:
    """Yield the layout with neighbouring groups as the replicas of a lane, if they have equal sizes."""
    lanes = [tuple(groups[start : start + replicas]) for start in range(0, len(groups), replicas)]
    if all(len({len(group) for group in lane}) == 1 for lane in lanes):
        yield GroupLayout(tuple(lanes))


def _device_rows(network: Network) -> Iterator[Devices]:
    """Yield devices in a row: hosts in any order, up to `host_orders` of them, and without the devices of each kind."""
    names = [kind.name for kind in network.kinds]
    hosts: dict[int, list[int]] = {}
    for device, host in enumerate(network.host):
        hosts.setdefault(host, []).append(device)
    for order in itertools.islice(itertools.permutations(hosts.values()), GROUP_BUDGET.host_orders):
        row = tuple(itertools.chain.from_iterable(order))
        yield row
        for left_out in sorted({*names}) if len({*names}) > 1 else ():
            yield tuple(device for device in row if names[device] != left_out)


def _block_layouts(network: Network, batch: int, most_lanes: int) -> Iterator[GroupLayout]:
    """Yield grids of equal blocks inside hosts, and groups of all devices of a kind, or of all devices."""
    sizes = [network.host.count(host) for host in {*network.host}]
    blocks = {size for size in GROUP_BUDGET.block_devices if size <= max(sizes)}
    for size in sorted(blocks | ({*sizes} if len({*sizes}) == 1 else set())):
        for groups in _block_orders(network, size):
            for lanes in (lanes for lanes in GROUP_BUDGET.block_lanes if lanes <= min(len(groups), most_lanes)):
                replicas = max(r for r in range(1, min(len(groups) // lanes, batch) + 1) if batch % r == 0)
                for inner in ("replica", "stage")[: 1 + (lanes > 1 and replicas > 1)]:
                    yield GroupLayout(tuple(_block_grid(groups, lanes, replicas, inner)))
    if network.devices <= GROUP_BUDGET.widest_group_devices:
        everyone = tuple(range(network.devices))
        yield GroupLayout(((everyone,),))
        kinds: dict[str, list[int]] = {}
        for device in everyone:
            kinds.setdefault(network.kinds[device].name, []).append(device)
        kind_groups = [tuple(members) for members in kinds.values()]
        for order in itertools.islice(itertools.permutations(kind_groups), GROUP_BUDGET.host_orders):
            yield GroupLayout(tuple((group,) for group in order))
            common = gcd(*map(len, order))
            for replicas in (r for r in (2, 4, 8) if common % r == 0):
                yield GroupLayout(tuple(tuple(group[r::replicas] for r in range(replicas)) for group in order))
        for group in kind_groups if len(kind_groups) > 1 else ():
            yield GroupLayout(((group,),))


def _block_orders(network: Network, size: int) -> list[list[Devices]]:
    """Return blocks of `size` devices of one host, in the order of the hosts, and by kind if there are several."""
    by_host: dict[int, list[int]] = {}
    for device, host in enumerate(network.host):
        by_host.setdefault(host, []).append(device)
    blocks = [
        tuple(devices[start : start + size])
        for devices in by_host.values()
        for start in range(0, len(devices) - size + 1, size)
    ]
    by_kind = sorted(blocks, key=lambda block: network.kinds[block[0]].name)
    return [blocks] if by_kind == blocks else [blocks, by_kind]


def _block_grid(groups: Sequence[Devices], lanes: int, replicas: int, inner: str) -> Iterator[tuple[Devices, ...]]:
    for lane in range(lanes):
        if inner == "replica":
            yield tuple(groups[lane * replicas : (lane + 1) * replicas])
        else:
            yield tuple(groups[replica * lanes + lane] for replica in range(replicas))
