"""The devices with which a bucket's collectives run, for state sharded over all replicas or over groups of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipefit.layout import Mesh, group_peers, home_group
from pipefit.plan.types import Plan
from pipefit.run.update.buckets import BucketEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDevices:
    """The devices of one bucket's state, seen from one of them."""

    group: tuple[int, ...]
    "Devices that shard the state together, in the order of their pieces."
    peers: tuple[int, ...]
    "Devices that hold the same piece: one of every group."
    is_first: bool
    "True in the first group, which counts the piece in sums over all devices."


def state_devices(mesh: Mesh, device: int, entry: BucketEntry) -> StateDevices:
    """Return the devices of the state of an entry's bucket."""
    groups = mesh.groups_along(device, entry.state_axes, entry.state_group)
    return StateDevices(
        group=home_group(groups, device), peers=group_peers(groups, device), is_first=device in groups[0]
    )


def state_process_groups(plan: Plan, ranks: Mapping[int, int]) -> list[list[int]]:
    """Return the ranks of all process groups that state in groups of neighbours needs, beside those of the axes of the
    meshes. `ranks[device]` is a global rank."""
    result: list[list[int]] = []
    meshes = dict.fromkeys((plan.stage_mesh(index), stage.state_group) for index, stage in enumerate(plan.stages))
    for mesh, size in meshes:
        for device in mesh.devices if size else ():
            groups = mesh.groups_along(device, ("replica", "context"), size)
            for members in (home_group(groups, device), group_peers(groups, device)):
                spread = mesh.spread_along(members, ("shard",))
                result += [[ranks[member] for member in members], [ranks[member] for member in spread]]
    return result
