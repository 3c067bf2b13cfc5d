"""Groups of devices of a stage that differ along one axis of its mesh, and so run collectives together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from pipefit.cost.work import StageWork
from pipefit.layout import AxisName, Mesh


def shard_rings(stage: StageWork) -> tuple[tuple[int, ...], ...]:
    """Return the devices of every shard group of a stage."""
    return axis_rings(stage.group, "shard")


def expert_rings(stage: StageWork) -> tuple[tuple[int, ...], ...]:
    """Return the devices that divide the experts with each other: an expert axis and the shard axis together."""
    return axis_rings(stage.group, "expert", "shard")


def replica_rings(stage: StageWork) -> tuple[tuple[int, ...], ...]:
    """Return the devices that hold the same shard, of all rows and parts of sequences: one ring per shard position."""
    return axis_rings(stage.group, "replica", "context")


def state_rings(stage: StageWork) -> tuple[tuple[int, ...], ...]:
    """Return the devices that shard the state of the same parameters: the rings of the replicas, or parts of them."""
    return divide_rings(replica_rings(stage), stage.state_group)


def split_elements(stage: StageWork, elements: int, spread: int) -> Iterator[tuple[int, tuple[tuple[int, ...], ...]]]:
    """Yield (elements, devices that sum or gather them together) of a device's elements, of which `spread` are
    replicated over an axis that divides rows and experts.

    The rings of the sharded state sum them. Those of the spread ones have all positions of that axis.
    """
    if stage.row_parts > 1:
        yield spread, axis_rings(stage.group, "replica", "context", stage.row_axis)
        elements -= spread
    yield elements, state_rings(stage)


def copy_rings(stage: StageWork) -> tuple[tuple[int, ...], ...]:
    """Return the devices that hold copies of the same piece of sharded state; () if there is one of each piece."""
    if not stage.state_group:
        return ()
    groups = [_ring_groups(ring, stage.state_group) for ring in replica_rings(stage)]
    return tuple(peers for ring_groups in groups for peers in zip(*ring_groups, strict=True))


def divide_rings(rings: tuple[tuple[int, ...], ...], size: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of `size` neighbours of every ring; the rings for a size of 0."""
    return tuple(group for ring in rings for group in _ring_groups(ring, size)) if size else rings


def _ring_groups(ring: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Return the groups of a ring as `Mesh.groups_along` does."""
    return [tuple(sorted(ring[start : start + size])) for start in range(0, len(ring), size)]


def context_rings(stage: StageWork) -> tuple[tuple[int, ...], ...]:
    """Return the devices that hold parts of the same sequences, and the same shard."""
    return axis_rings(stage.group, "context")


@lru_cache(maxsize=4096)
def axis_rings(group: Mesh, *names: AxisName) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices that differ along these axes only, in grid order."""
    rings: dict[tuple[int, ...], list[int]] = {}
    for device, coordinates in grid_positions(group):
        fixed = tuple(
            -1 if axis.name in names else position for axis, position in zip(group.axes, coordinates, strict=True)
        )
        rings.setdefault(fixed, []).append(device)
    return tuple(map(tuple, rings.values()))


def grid_positions(group: Mesh) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (device, its position along every axis) in grid order."""
    return zip(group.devices, itertools.product(*(range(axis.size) for axis in group.axes)), strict=True)
