"""One profile from start to end, on every rank: introductions, layers, links, collectives, then the cluster file.

All ranks run the same code; rank 0 makes the shared decisions, shows progress, and writes. Layers come before links, so
that a failing network does not lose measurements that do not need it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import torch
import torch.distributed as dist

from pipefit.cluster.files import save_cluster_file
from pipefit.cluster.types import Cluster
from pipefit.codec import from_data, to_data
from pipefit.cost.comm.lowerings import DIRECT
from pipefit.profile.assemble import assemble_cluster
from pipefit.profile.calibrate import add_ratios, collective_curve, fit_efficiency
from pipefit.profile.config import ProfileConfig
from pipefit.profile.device import measure_rates
from pipefit.profile.facts import DeviceRates, middle_rates
from pipefit.profile.layer_phase import LAYERS_S, measure_layers
from pipefit.profile.link_phase import measure_links
from pipefit.profile.state import ProfileSession, Show
from pipefit.profile.wire import OPERATIONS, LinkEndpoint, typical_collective_time
from pipefit.run.session.rendezvous import World, choose_device
from pipefit.run.transfers.comms import backend_for


def run_profile(config: ProfileConfig, show: Show) -> Cluster:
    """Measure as one rank of the run described by the environment (or alone); return the cluster. Rank 0 writes it.

    Raises ClusterError naming the host that failed; earlier measurements are in the partial file.
    """
    world = World(choose_device(config.device, _local_rank()))
    world.open_store()
    device = world.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size > 1:
        dist.init_process_group(
            backend_for(device),
            store=dist.PrefixStore("profile/group", world.store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=config.timeout_s / 2),
        )
    try:
        return ProfileRun(config, world, show if world.rank == 0 else _show_nothing).measure_all()
    finally:
        world.stop_group()


class ProfileRun(ProfileSession):
    """The phases of one profile on one rank."""

    def measure_all(self) -> Cluster:
        """Run all phases in order."""
        self._measure_rates()
        graphs = measure_layers(self) if self.config.only != "links" else []
        measure_links(self)
        cluster = self._assemble_cluster()
        kinds = {
            name: replace(kind, efficiency=fit_efficiency(kind, graphs, self.found.layers))
            for name, kind in cluster.kinds.items()
        }
        for kind in kinds.values():
            self.found.layers = add_ratios(kind, graphs, self.found.layers)
        cluster = replace(cluster, kinds=kinds)
        if self.config.only != "links":
            self._measure_collectives(cluster)
        cluster = replace(cluster, measured=self._assemble_cluster().measured)
        if self.rank == 0:
            save_cluster_file(cluster, self.config.output)
            self.file.remove()
        self.board.barrier()
        return cluster

    def _assemble_cluster(self) -> Cluster:
        when = datetime.now(UTC).replace(microsecond=0).isoformat()
        name = self.config.name or self.config.output.stem
        return assemble_cluster(self.found, name, when, time.monotonic() - self.started)

    def _measure_rates(self) -> None:
        """Measure matrix products, copies and small operators, on all devices at once."""
        self.show("devices", 0, 1)
        self.board.barrier()
        rates = self.board.gather(to_data(measure_rates(self.device)), LAYERS_S)
        self.require_all("devices")
        for member in self.members:
            name = self.kinds[member.kind]
            same = [peer.rank for peer in self.members if self.kinds[peer.kind] == name]
            self.found.rates[name] = middle_rates(
                [from_data(DeviceRates, rates[rank], f"rank {rank}") for rank in same]
            )
        self.show("devices", 1, 1)

    def _measure_collectives(self, cluster: Cluster) -> None:
        """Measure on the groups of `collective_groups`, the groups of a round at the same time."""
        rounds = collective_groups([tuple(ranks) for ranks in self.hosts.values()])
        groups = {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(itertools.chain(*rounds))}
        wire = LinkEndpoint(self.board, self.device)
        jobs = [(beside, operation) for beside in rounds for operation in OPERATIONS]
        sizes = self.config.sizes_bytes[1:]
        for done, (beside, operation) in enumerate(jobs):
            self.show("collectives", done, len(jobs))
            ranks = beside[0]
            table: list[list[float]] = []
            for _ in range(self.config.link_rounds):
                self.board.barrier()
                own_times = []
                for mine in [group for group in beside if self.rank in group]:
                    own_times = [wire.collective_times(operation, groups[mine], len(mine), size) for size in sizes]
                gathered = self.board.gather(own_times)
                self.require_all("collectives")
                table.append(
                    [
                        typical_collective_time(operation, [gathered[rank][i] for rank in ranks])
                        for i in range(len(sizes))
                    ]
                )
            columns = list(zip(*table, strict=True))
            time_s = [statistics.median(column) if operation in DIRECT else min(column) for column in columns]
            spread = [(max(c) - min(c)) / t for c, t in zip(columns, time_s, strict=True)]
            self.found.collectives.append(collective_curve(cluster, operation, ranks, sizes, time_s, spread))
        self.show("collectives", len(jobs), len(jobs))


def collective_groups(hosts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Return rounds of groups for measuring collectives; groups of a round run together, and the first one's times
    count.

    The rounds are: all ranks; each host's ranks on all hosts, like groups of a run's replicas; one rank of every host;
    and 2, 4, 8, ... neighbouring ranks inside all hosts, like shards.
    """
    largest = sorted(hosts, key=len, reverse=True)
    rounds = [[tuple(itertools.chain(*hosts))], largest, [tuple(ranks[0] for ranks in hosts)]]
    for size in itertools.takewhile(lambda size: size < len(largest[0]), (2**power for power in itertools.count(1))):
        rounds.append(
            [host[start : start + size] for host in largest for start in range(0, len(host) - size + 1, size)]
        )
    several = {beside[0]: [ranks for ranks in beside if len(ranks) > 1] for beside in rounds}
    return [beside for beside in several.values() if beside]


def _show_nothing(what: str, done: int, total: int) -> None:
    """Show no progress: for ranks other than 0."""


def _local_rank() -> int:
    import os

    return int(os.environ.get("LOCAL_RANK", "0"))
