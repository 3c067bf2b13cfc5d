"""What placements are compared on: clusters with unlike links, seeded, and one pipeline on each of them.

A host stands for the devices of one machine that run a tensor-parallel group together, as in Pipette's mapping of
servers: one slot. Models are stacks of two linear layers, as plain operator graphs, so that no torch is needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster
from pipefit.cluster.types import Rail
from pipefit.model.graph import Graph, Layer, Model, ModelModule, Operator, ParameterSpec, TensorSpec
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.port_contention import without_contention
from pipefit.plan.placement.shape import PlacementProblem, build_problem
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job

DATA = Path(__file__).parents[1] / "data"
Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One pipeline on one cluster."""

    name: str
    latency_s: Matrix
    bandwidth: Matrix
    "[host, host] bytes/s."
    stages: int
    width: int = 8192
    sequence: int = 4096
    kind: str = "H100"
    devices: int = 1
    "Of every host."

    @property
    def hosts(self) -> int:
        return len(self.bandwidth)

    @property
    def replicas(self) -> int:
        return self.hosts * self.devices // self.stages

    @cached_property
    def cluster(self) -> Cluster:
        cluster = plain_spec(f"{self.hosts}x{self.devices}x{self.kind}:25GB/s")
        rail = Rail(
            name="network",
            latency_s=tuple(map(tuple, self.latency_s.tolist())),
            bandwidth_bytes_per_s=tuple(map(tuple, self.bandwidth.tolist())),
        )
        return replace(cluster, rails=(rail,))

    @cached_property
    def context(self) -> PlannerContext:
        return PlannerContext(stack(2 * self.stages, self.width), self.cluster)

    @property
    def job(self) -> Job:
        return Job(batch=self.replicas * self.microbatches, sequence=self.sequence, precision="bfloat16")

    @property
    def microbatches(self) -> int:
        return 4 * self.stages

    def decisions(self, inner: str = "stage", devices: tuple[int, ...] = ()) -> ParallelConfig:
        return ParallelConfig(
            stages=self.stages,
            cuts=tuple(range(2, 2 * self.stages, 2)),
            replicas=(1,) * self.replicas,
            microbatches=self.microbatches,
            inner=inner,
            devices=devices,
        )

    def simulated(self, decisions: ParallelConfig) -> EvaluatedPlan:
        """The simulated candidate, its order lowered for its own times, all replicas in step."""
        return without_contention(
            evaluate_candidate(self.context, decisions, self.context.make_skeleton(self.job, decisions))
        )

    def step_s(self, devices: tuple[int, ...] | list[int] | NDArray[Any]) -> float:
        """The simulated iteration of a placement: device of every (stage, replica)."""
        count = self.stages * self.replicas
        return self.simulated(self.decisions(devices=tuple(int(d) for d in devices[:count]))).step_s

    def question(self, start: EvaluatedPlan) -> PlacementProblem:
        return build_problem(
            start.simulation.work, self.context.network, self.context.layers, start.simulation.timeline
        )

    @cached_property
    def compute_s(self) -> float:
        """The iteration if all messages were free."""
        free = replace(self, latency_s=np.zeros_like(self.latency_s), bandwidth=np.full_like(self.bandwidth, 1e30))
        return free.simulated(free.decisions()).step_s


def stack(layers: int, width: int) -> Model:
    """Layers of two linears of inner width 4 x `width`."""
    inner = 4 * width
    shapes = {"x": width, "h": inner, "a": inner, "d": width, "y": width}
    tensors = {name: TensorSpec(name=name, shape=("B", "T", size)) for name, size in shapes.items()}
    graph = Graph(
        inputs=(tensors["x"],),
        outputs=("y",),
        operators=(
            Operator(kind="linear", inputs=("x", "up", ""), outputs=("h",)),
            Operator(kind="silu", inputs=("h",), outputs=("a",)),
            Operator(kind="linear", inputs=("a", "down", ""), outputs=("d",)),
            Operator(kind="add", inputs=("x", "d"), outputs=("y",)),
        ),
        parameters=(
            ParameterSpec(name="up", shape=(inner, width)),
            ParameterSpec(name="down", shape=(width, inner)),
        ),
        tensors=tuple(tensors[name] for name in ("h", "a", "d", "y")),
    )
    chain = tuple(
        Layer(name=f"layers.{i}", graph="block", parameters={"up": f"layers.{i}.up", "down": f"layers.{i}.down"})
        for i in range(layers)
    )
    return Model(
        family="user", config={}, modules=(ModelModule(name="language", layers=chain),), graphs={"block": graph}
    )


def skewed(hosts: int, stages: int, seed: int) -> Instance:
    """Around 25 GB/s, lognormal with sigma 0.35 by pair (both ways alike), one host in ten at 0.4 of it."""
    random = np.random.default_rng(seed)
    pair = random.normal(0.0, 0.35, (hosts, hosts))
    bandwidth = 25e9 * np.exp((pair + pair.T) / 2 * np.sqrt(2))
    slow = np.where(random.random(hosts) < 0.1, 0.4, 1.0)
    bandwidth = bandwidth * np.minimum(slow[:, None], slow[None, :])
    latency_s = np.full((hosts, hosts), 10e-6)
    np.fill_diagonal(latency_s, 0.0)
    return Instance(
        name=f"skewed, {hosts} hosts, {stages} stages", latency_s=latency_s, bandwidth=bandwidth, stages=stages
    )


def racks(hosts: int, stages: int, per_rack: int, seed: int) -> Instance:
    """Racks of hosts whose names are shuffled: 25 GB/s within, 6 GB/s between, each pair within 10 %."""
    random = np.random.default_rng(seed)
    rack = random.permutation(hosts) // per_rack
    bandwidth = np.where(rack[:, None] == rack[None, :], 25e9, 6e9) * random.uniform(0.9, 1.1, (hosts, hosts))
    latency_s = np.where(rack[:, None] == rack[None, :], 10e-6, 30e-6)
    np.fill_diagonal(latency_s, 0.0)
    return Instance(
        name=f"racks of {per_rack}, {hosts} hosts, {stages} stages",
        latency_s=latency_s,
        bandwidth=bandwidth,
        stages=stages,
    )


def lab(stages: int, seed: int) -> Instance:
    """Eight hosts as a lab shapes them: half of the links 25 Gbit/s, half 10, by host; one host's port at 5."""
    random = np.random.default_rng(seed)
    port = random.permutation([25.0, 25.0, 25.0, 25.0, 10.0, 10.0, 10.0, 5.0])
    gbit = np.minimum(port[:, None], port[None, :]) * random.uniform(0.95, 1.05, (8, 8))
    latency_s = np.full((8, 8), 50e-6)
    np.fill_diagonal(latency_s, 0.0)
    return Instance(
        name=f"lab, 8 hosts, {stages} stages",
        latency_s=latency_s,
        bandwidth=gbit * 1e9 / 8,
        stages=stages,
        width=4096,
        sequence=2048,
        kind="A100-80",
    )


def regions(stages: int) -> Instance:
    """Ten cloud regions with measured delays and bandwidths, one host in each."""
    data = json.loads((DATA / "cloud_regions.json").read_text(encoding="utf-8"))
    names = sorted({name for pair in data["pairs"] for name in pair[:2]})
    at = {name: index for index, name in enumerate(names)}
    latency_s, bandwidth = np.zeros((10, 10)), np.full((10, 10), 1e9)
    for one, other, delay_ms, gbit_per_s in data["pairs"]:
        for a, b in ((at[one], at[other]), (at[other], at[one])):
            latency_s[a, b], bandwidth[a, b] = delay_ms * 1e-3, gbit_per_s * 1e9 / 8
    return Instance(
        name=f"cloud regions, 10 hosts, {stages} stages",
        latency_s=latency_s,
        bandwidth=bandwidth,
        stages=stages,
        width=2048,
        sequence=1024,
        kind="V100",
    )


SMALL = [lab(2, 1), lab(4, 2), regions(2), regions(5)]
"""So small that all placements can be gone through."""

LARGE = [
    skewed(16, 4, 11),
    racks(16, 4, 4, 12),
    skewed(64, 4, 13),
    skewed(64, 8, 14),
    skewed(64, 16, 15),
    racks(64, 8, 8, 16),
    skewed(128, 8, 17),
    skewed(128, 16, 18),
    skewed(1024, 8, 19),
]
