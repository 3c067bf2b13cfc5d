"""The devices of a cluster by kind: the device kinds of each lane, and the costs that depend on them.

The devices of a lane run in lockstep, so its costs depend only on the set of (kind, rows of a microbatch) among its
devices, or among its shard groups if each of them lies in one host. Other shard groups are told apart by their devices,
because their links count too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.comm.network import Network
from pipefit.layout import Mesh, MeshAxis
from pipefit.plan.devices.device_kinds import Pattern
from pipefit.plan.request.decisions import ParallelConfig

KindRows = tuple[str, int]
"""(name of a device kind, rows of a microbatch on such a device)."""

KindRuns = tuple[tuple[str, int], ...]
"""The kinds of the replicas of a lane in order, run-length encoded: (kind, count)."""


class DeviceFleet:
    """The devices of a cluster by kind. Kinds are in the order of the hosts."""

    def __init__(self, network: Network, context_parts: int = 1) -> None:
        """`context_parts`: number of devices that hold parts of each sequence; a shard group is one for all of them."""
        self.network = network
        self.context_parts = context_parts
        names = [kind.name for kind in network.kinds]
        self.names: tuple[str, ...] = tuple(dict.fromkeys(names))
        index = {name: number for number, name in enumerate(self.names)}
        self.kind: NDArray[np.int64] = np.array([index[name] for name in names], dtype=np.int64)
        "[device]: index of its kind."
        self.devices: tuple[tuple[int, ...], ...] = tuple(
            tuple(np.flatnonzero(self.kind == number).tolist()) for number in range(len(self.names))
        )
        "[kind]: its devices."

    @property
    def is_mixed(self) -> bool:
        """True if there is more than one kind."""
        return len(self.names) > 1

    @lru_cache(maxsize=64)  # noqa: B019 - a fleet lives as long as its search
    def fills_hosts(self, shards: int) -> bool:
        """Return whether groups of adjacent `shards` devices (of all positions of an expert axis) for each part of a
        sequence fill every host, and equal kinds have equal links."""
        size = shards * self.context_parts
        if size == 1:
            return True
        hosts = self.network.cluster.hosts
        links = {(host.kind, host.link) for host in hosts}
        return all(host.devices % size == 0 for host in hosts) and len(links) == len(self.names)

    def has_host_groups(self, decisions: ParallelConfig) -> bool:
        """Return whether equal shard groups of a candidate have equal costs: each lies in one host."""
        shards = decisions.shard_devices
        if decisions.lane_shards:
            return False
        size = shards * self.context_parts
        return self.fills_hosts(shards) and (size == 1 or self._stays_in_hosts(decisions.devices, size))

    @lru_cache(maxsize=1024)  # noqa: B019 - a fleet lives as long as its search
    def _stays_in_hosts(self, devices: tuple[int, ...], shards: int) -> bool:
        host = np.array(self.network.host)[list(devices)].reshape(-1, shards)
        return bool((host == host[:, :1]).all())

    def sample_group(
        self, pairs: frozenset[KindRows], shards: tuple[int, ...] = (1,), expert: int = 1
    ) -> tuple[Mesh, tuple[int, ...]]:
        """Return a mesh with one shard group (or `expert` of them that divide rows) in one host for every pair, one
        replica each, and their rows."""
        ordered = sorted(pairs)
        size = self.context_parts * expert * len(shards)
        devices = tuple(device for name, _ in ordered for device in self.devices[self.names.index(name)][:size])
        axes = [MeshAxis(name="replica", shares=(1,) * len(ordered))]
        if self.context_parts > 1:
            axes.append(MeshAxis(name="context", shares=(1,) * self.context_parts))
        if expert > 1:
            axes.append(MeshAxis(name="expert", shares=(1,) * expert))
        if len(shards) > 1:
            axes.append(MeshAxis(name="shard", shares=shards))
        return Mesh(axes=tuple(axes), devices=devices), tuple(rows for _, rows in ordered)

    def lane_pairs(self, decisions: ParallelConfig, rows: tuple[int, ...]) -> Sequence[frozenset[KindRows]]:
        """Return the pairs of kinds and rows of every lane; `rows` of every replica. For layouts whose shard groups
        lie in one host each."""
        if not self.is_mixed:
            return [frozenset((self.names[0], count) for count in {*rows})] * decisions.lane_count
        shards = decisions.shard_devices
        return self._lane_pair_sets(decisions.devices, decisions.inner, decisions.lane_count, rows, shards)

    @lru_cache(maxsize=1024)  # noqa: B019 - a fleet lives as long as its search
    def _lane_pair_sets(
        self, devices: tuple[int, ...], inner: str, lanes: int, rows: tuple[int, ...], shards: int
    ) -> tuple[frozenset[KindRows], ...]:
        all_runs = self.lane_runs(devices, inner, lanes, len(rows), shards)
        known = {runs: pairs_of(runs, rows) for runs in {*all_runs}}
        return tuple(known[runs] for runs in all_runs)

    def kind_pattern(self, decisions: ParallelConfig) -> Pattern:
        """Return the kinds of a candidate's devices; for a shard group, the kind of its first device."""
        devices = np.array(decisions.lane_devices())[:, :: self.context_parts * decisions.shard_devices]
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        lines = (tuple(line) for line in self.kind[devices].tolist())
        return tuple(known.setdefault(line, line) for line in lines)

    def lane_runs(
        self, devices: tuple[int, ...], inner: str, lanes: int, replicas: int, shards: int = 1
    ) -> list[KindRuns]:
        """Return the kinds of every lane's replicas, with devices in the order of `ParallelConfig.lane_devices`. A
        shard group has the kind of its first device."""
        size = shards * self.context_parts
        count = lanes * replicas * size
        if devices:
            kinds = self.kind[list(devices)][::size].reshape(lanes, replicas)
        elif inner == "replica":
            kinds = self.kind[:count:size].reshape(lanes, replicas)
        else:
            kinds = self.kind[:count:size].reshape(replicas, lanes).T
        known: dict[bytes, KindRuns] = {}
        lane_kinds = []
        for row in np.ascontiguousarray(kinds):
            key = row.tobytes()
            if key not in known:
                known[key] = self._kind_runs(row)
            lane_kinds.append(known[key])
        return lane_kinds

    def runs_of(self, pattern: Pattern) -> list[KindRuns]:
        """Return the kinds of every lane's replicas in a pattern."""
        lines = {id(line): line for line in pattern}
        known = {key: self._kind_runs(np.array(line)) for key, line in lines.items()}
        return [known[id(line)] for line in pattern]

    def _kind_runs(self, kinds: NDArray[np.int64]) -> KindRuns:
        edges = np.flatnonzero(np.diff(kinds)) + 1
        starts = [0, *edges.tolist()]
        stops = [*edges.tolist(), len(kinds)]
        return tuple((self.names[kinds[start]], stop - start) for start, stop in zip(starts, stops, strict=True))


def pairs_of(runs: KindRuns, rows: tuple[int, ...]) -> frozenset[KindRows]:
    """Return the pairs of a lane whose replicas have these kinds and rows."""
    pairs: set[KindRows] = set()
    start = 0
    for name, count in runs:
        pairs |= {(name, row_count) for row_count in {*rows[start : start + count]}}
        start += count
    return frozenset(pairs)
