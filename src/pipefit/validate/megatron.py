"""A published run of Megatron-LM as input of this project's cost table: stages, groups, messages, cluster.

Ranks follow Megatron's numbering: tensor parallel fastest, then data, then pipeline; eight devices per host. Layers are
divided evenly; the embedding is on the first stage, head and loss on the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from pipefit.cluster.types import Cluster, DeviceKind, Host, Link, Provenance, Rail
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.roofline import LayerCosts
from pipefit.cost.pipeline.table import cost_table
from pipefit.cost.types import CostTable
from pipefit.cost.work import EdgeWork, ParameterCounts, PipelineWork, StageWork
from pipefit.layout import Mesh, MeshAxis
from pipefit.model.analysis.saved import Recompute
from pipefit.model.graph import Graph, element_count
from pipefit.schedule import ScheduleProblem, find_family, lower_schedule, uniform_costs
from pipefit.schedule.actions import Schedule
from pipefit.schedule.problem import looped_placement
from pipefit.simulate import Timeline, simulate_schedule
from pipefit.validate.collectives import MeasuredAllReduces
from pipefit.validate.gpt import GptSizes, embedding_graph, head_graph, layer_graphs

DEVICES_PER_HOST = 8
WIDTH = 2
"""Bytes of an activation in half precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRun:
    """Arguments of a run's command line."""

    model: GptSizes
    shards: int
    "Tensor parallel size."
    replicas: int
    lanes: int
    "Pipeline parallel size."
    turns: int = 1
    "Stages per lane (interleaving)."
    micro_batch: int
    "Rows of one microbatch on one replica."
    microbatches: int
    sequence_parallel: bool = False
    recompute: Recompute = "none"

    @property
    def stage_count(self) -> int:
        return self.lanes * self.turns

    @property
    def total_devices(self) -> int:
        return self.shards * self.replicas * self.lanes


def cluster_of(
    devices: int, *, inside_bytes_per_s: float, between_bytes_per_s: float, latency_s: float = 5e-6
) -> Cluster:
    """Build hosts of eight equal devices; every device has its own port to other hosts."""
    hosts = max(1, -(-devices // DEVICES_PER_HOST))
    kind = DeviceKind(
        name="A100-80",
        memory_bytes=80 * 10**9,
        peak_flops_per_s={"bfloat16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
        memory_bandwidth_bytes_per_s=2039e9,
    )
    flat = tuple((latency_s,) * hosts for _ in range(hosts))
    speed = tuple((between_bytes_per_s,) * hosts for _ in range(hosts))
    rail = Rail(name="rails", latency_s=flat, bandwidth_bytes_per_s=speed, shared_ports=False)
    per_host = min(devices, DEVICES_PER_HOST)
    return Cluster(
        name="published",
        kinds={kind.name: kind},
        links={"nvlink": Link(latency_s=latency_s, bandwidth_bytes_per_s=inside_bytes_per_s)},
        hosts=tuple(Host(name=f"host{i}", kind=kind.name, devices=per_host, link="nvlink") for i in range(hosts)),
        rails=(rail,) if hosts > 1 else (),
        provenance=Provenance(source="data-sheet", where="as the publication describes its machines"),
    )


@lru_cache(maxsize=256)
def schedule_of(lanes: int, turns: int, microbatches: int) -> Schedule:
    """Return the lowered 1F1B schedule, interleaved if a lane holds several stages, with transfers, reductions and the
    optimizer step."""
    name = "1f1b" if turns == 1 else "interleaved-1f1b"
    placement = looped_placement(lanes, turns)
    costs = uniform_costs(placement, forward_s=1.0, input_s=1.0, weight_s=1.0)
    return lower_schedule(
        find_family(name)(ScheduleProblem(placement=placement, microbatches=microbatches)), costs=costs
    )


def work_of(run: MegatronRun) -> PipelineWork:
    """Return the work of every stage and edge. Raises AssertionError if the layers cannot be divided evenly; readers
    check that."""
    body = layer_graphs(run.model, run.shards, run.sequence_parallel)
    per_stage, rest = divmod(run.model.layers, run.stage_count)
    assert not rest, f"{run.model.layers} layers on {run.stage_count} stages"
    stages = []
    for index in range(run.stage_count):
        layers: list[tuple[Graph, ...]] = [body] * per_stage
        if index == 0:
            layers.insert(0, (embedding_graph(run.model, run.shards),))
        if index == run.stage_count - 1:
            layers.append((head_graph(run.model, run.shards),))
        stages.append(_stage_work(run, index, layers))
    edges = tuple(_edge_work(run, index) for index in range(run.stage_count - 1))
    return PipelineWork(stages=tuple(stages), edges=edges, precision="bfloat16")


def costs_of(
    run: MegatronRun,
    network: Network,
    layers: LayerCosts,
    collectives: MeasuredAllReduces,
    step_s_per_parameter: float | None = None,
) -> CostTable:
    """Return the project's cost table for the run. Gradients are reduced in half precision, as in Megatron-LM of that
    time. `step_s_per_parameter` replaces the optimizer's memory traffic over the bandwidth."""
    work = work_of(run)
    counts = [max(stage.parameters.trainable) for stage in work.stages]
    reduce_s = [collectives.collective_s("all_reduce", run.replicas, count * WIDTH) for count in counts]
    costs = replace(cost_table(work, network, layers), reduce_s=np.array(reduce_s), overhead_s=0.0)
    if step_s_per_parameter is None:
        return costs
    steps = np.zeros(run.lanes)
    for stage, count in zip(work.stages, counts, strict=True):
        steps[stage.lane] += count * step_s_per_parameter
    return replace(costs, step_s=steps)


def time_of(run: MegatronRun, costs: CostTable) -> Timeline:
    """Simulate the run's schedule, gradient reductions and optimizer step included."""
    return simulate_schedule(schedule_of(run.lanes, run.turns, run.microbatches), costs)


def with_waiting_sends(costs: CostTable, receives_too: bool = False) -> CostTable:
    """Return a table in which a lane is blocked while it sends and, with `receives_too`, while it receives.

    Megatron-LM waits for every exchange with a neighbour, and both directions run at the same time. So each action is
    longer by the time of sending its result. A runtime that sends and receives in sequence pays for both.
    """
    forward, backward = np.zeros(len(costs.reduce_s)), np.zeros(len(costs.reduce_s))
    for edge in costs.edges:
        forward[edge.source] += float(edge.forward_s.max())
        backward[edge.target] += float(edge.backward_s.max())
        if receives_too:
            forward[edge.target] += float(edge.forward_s.max())
            backward[edge.source] += float(edge.backward_s.max())
    longer = {"F": forward, "B": backward}
    actions = {
        name: replace(table, time_s=table.time_s + longer[name][:, None, None]) if name in longer else table
        for name, table in costs.actions.items()
    }
    none = np.zeros((1, 1))
    edges = tuple(
        replace(edge, forward_s=none, backward_s=none, forward_port_s=none, backward_port_s=none)
        for edge in costs.edges
    )
    return replace(costs, actions=actions, edges=edges)


def parameter_count(graph: Graph) -> int:
    """Return the number of elements of all parameters of a graph."""
    key = id(graph)
    if key not in _counts:
        _counts[key] = (graph, sum(element_count(p.shape, {}) for p in graph.parameters))
    return _counts[key][1]


_counts: dict[int, tuple[Graph, int]] = {}


def _stage_work(run: MegatronRun, index: int, layers: Sequence[tuple[Graph, ...]]) -> StageWork:
    group = _lane_mesh(run, index % run.lanes)
    counts = sum(parameter_count(graphs[0]) for graphs in layers)
    return StageWork(
        lane=index % run.lanes,
        group=group,
        layers=tuple(layers),
        rows=(run.micro_batch,) * run.replicas,
        slices=(run.model.sequence,),
        recompute=run.recompute,
        parameters=ParameterCounts(trainable=(counts,) * run.shards, frozen=(0,) * run.shards, whole=(0,) * run.shards),
        sharded_state="none",
    )


def _lane_mesh(run: MegatronRun, lane: int) -> Mesh:
    size = run.shards * run.replicas
    axes = (MeshAxis(name="replica", shares=(1,) * run.replicas), MeshAxis(name="shard", shares=(1,) * run.shards))
    return Mesh(axes=axes, devices=tuple(range(lane * size, (lane + 1) * size)))


def _edge_work(run: MegatronRun, index: int) -> EdgeWork:
    """Return the messages of an edge: every device sends its shard of the activation (scatter of arXiv 2104.04473,
    section 4.1)."""
    ahead, back = _lane_mesh(run, index % run.lanes).devices, _lane_mesh(run, (index + 1) % run.lanes).devices
    size = run.micro_batch * run.model.sequence * run.model.hidden * WIDTH / run.shards
    forward = tuple((a, b, size) for a, b in zip(ahead, back, strict=True))
    backward = tuple((b, a, size) for a, b in zip(ahead, back, strict=True))
    return EdgeWork(source=index, target=index + 1, tensor="", forward=(forward,), backward=(backward,))
