"""Contention of concurrent transfers: the pipelines of a plan, and the ports that their messages share.

The replicas of a stage wait for each other only in its reduction; until then every pipeline runs at the pace of its own
devices and links. Messages on one link are sent one after another (a sender's kernel serves them in order). Links,
ports and uplinks are shared evenly by their streams, including the rings of reductions (max-min fairness: Bertsekas and
Gallager 1992, 6.5.2). The simulator computes the shares (`schedule/taskgraph/fluid.py`).

An action of a sharded stage contains collectives, which load their ports on average. If a part p of the action is spent
in collectives, the action takes 1 + p times as long beside a reduction on the same ports, and so does the reduction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipefit.cost.comm.collectives import RingTuples, pass_levels, runs_backwards
from pipefit.cost.comm.network import Network, Port
from pipefit.cost.compute.roofline import LayerCosts
from pipefit.cost.pipeline.edges import edge_times
from pipefit.cost.pipeline.rings import context_rings, copy_rings, expert_rings, shard_rings, split_elements
from pipefit.cost.pipeline.stage_cost import StageCost, action_tables
from pipefit.cost.pipeline.table import collective_shares, stage_cost_key, stage_costs
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.cost.types import ActionTable, CostTable, FlowKey, PortContention, PortFlow
from pipefit.cost.work import EdgeWork, Message, PipelineWork, StageWork
from pipefit.layout import Mesh, MeshAxis

MOST_PIPELINES = 16
"""The largest number of replicas simulated one by one. More replicas run in step, at the pace of the slowest one."""


@dataclass(frozen=True, slots=True)
class _UnnumberedFlow:
    """A flow before its ports are numbered."""

    seconds: dict[Port, float]
    duration_s: float
    bytes_per_s: float
    queue: Port | None


class PipelineCosts(NamedTuple):
    """Replicas that run at their own pace, in order; or all replicas as one pipeline."""

    works: Sequence[PipelineWork]
    tables: tuple[CostTable, ...]
    "The times of each pipeline without contention."


def with_contention(
    costs: CostTable,
    work: PipelineWork,
    network: Network,
    layers: LayerCosts,
    alone: PipelineCosts | None = None,
) -> CostTable:
    """Return these costs with the contention of transfers.

    `costs` is `cost_table(work, network, layers)`; `alone` is the result of `split_pipelines`, if known.
    """
    works, tables = alone or split_pipelines(costs, work, network, layers)
    loads: dict[FlowKey, _UnnumberedFlow] = {}
    for pipeline, (pipeline_work, table) in enumerate(zip(works, tables, strict=True)):
        for index, edge in enumerate(pipeline_work.edges):
            cost = table.edges[index]
            for direction, slices, port_s in (
                ("F", edge.forward, cost.forward_port_s),
                ("B", edge.backward, cost.backward_port_s),
            ):
                for slice_, messages in enumerate(slices):
                    flow = _transfer_flow(messages, float(port_s[:, slice_].max()), network)
                    if flow is not None:
                        loads[f"SEND_{direction}", index, slice_, pipeline] = flow
    alone_on = Counter(stage.lane for stage in work.stages)
    shares = _CollectiveShares(network, layers)
    lanes: dict[FlowKey, int] = {}
    for index, stage in enumerate(work.stages):
        reductions = _reduction_flows(index, stage, work, network, costs)
        if alone_on[stage.lane] == 1:
            lanes |= dict.fromkeys(reductions, stage.lane)
        beside = _competing_groups(stage, network) if len(works) > 1 else [shard_rings(stage)]
        actions = {
            key: load
            for pipeline, pipeline_work in enumerate(works)
            for key, load in _action_flows(index, pipeline, pipeline_work, beside[pipeline], shares).items()
        }
        lanes |= dict.fromkeys(actions, stage.lane)
        loads |= reductions | actions
    return replace(costs, contention=_number_ports(tables, loads, lanes))


def split_pipelines(costs: CostTable, work: PipelineWork, network: Network, layers: LayerCosts) -> PipelineCosts:
    """Return the work and the times of every pipeline; `costs` are those of all of them."""
    works = _replica_works(work)
    return PipelineCosts(works, _times_alone(works, work, costs, network, layers) if len(works) > 1 else (costs,))


def _replica_works(work: PipelineWork) -> list[PipelineWork]:
    """Return the work of every replica, or all work as one.

    All replicas run in step if there are too many of them, if they exchange rows, or if they meet in every microbatch
    to gather parameters or sum gradients (ZeRO-2 and 3). Those with an expert axis are taken to exchange tokens at the
    same time, too.
    """
    if any(stage.has_sharded_layers or stage.expert_parts > 1 for stage in work.stages):
        return [work]
    counts = {stage.group.find_axis("replica").size for stage in work.stages}
    if len(counts) > 1 or not 1 < max(counts) <= MOST_PIPELINES:
        return [work]
    count = max(counts)
    replica_maps = [stage.group.axis_positions("replica") for stage in work.stages]
    for edge in work.edges:
        source, target = replica_maps[edge.source], replica_maps[edge.target]
        ahead, back = zip(*edge.ragged, strict=True) if edge.ragged else (edge.forward, edge.backward)
        if any(source[a] != target[b] for parts in ahead for a, b, _ in parts):
            return [work]
        if any(target[a] != source[b] for parts in back for a, b, _ in parts):
            return [work]
    edges = [_edges_of(edge, replica_maps[edge.source], count) for edge in work.edges]
    return [
        replace(
            work,
            stages=tuple(
                _of_replica(stage, replica_of, k) for stage, replica_of in zip(work.stages, replica_maps, strict=True)
            ),
            edges=tuple(parts[k] for parts in edges),
            tied=(),
        )
        for k in range(count)
    ]


def _of_replica(stage: StageWork, place: Mapping[int, int], k: int) -> StageWork:
    axes = tuple(MeshAxis(name=axis.name, shares=(1,)) if axis.name == "replica" else axis for axis in stage.group.axes)
    devices = tuple(device for device in stage.group.devices if place[device] == k)
    packed = tuple((row[k],) for row in stage.packed)
    return replace(stage, group=Mesh(axes=axes, devices=devices), rows=(stage.rows[k],), packed=packed)


def _edges_of(edge: EdgeWork, place: Mapping[int, int], count: int) -> list[EdgeWork]:
    """Return for every replica its part of the messages, those sent or received by its devices of the source stage.

    If microbatches differ, the replica's own largest microbatch represents all of them: the replica may have no message
    in the microbatch that is largest over all replicas.
    """
    ahead, back = (
        [_by_replica(messages, place, sent, count) for messages in slices]
        for slices, sent in ((edge.forward, True), (edge.backward, False))
    )
    ragged = [(_by_replica(a, place, True, count), _by_replica(b, place, False, count)) for a, b in edge.ragged]
    edges = []
    for k in range(count):
        pairs = tuple((a[k], b[k]) for a, b in ragged)
        forward, backward = tuple(parts[k] for parts in ahead), tuple(parts[k] for parts in back)
        if pairs:
            forward, backward = ((part,) for part in max(pairs, key=lambda pair: sum(size for _, _, size in pair[0])))
        edges.append(replace(edge, forward=forward, backward=backward, ragged=pairs))
    return edges


def _by_replica(
    messages: Sequence[Message], place: Mapping[int, int], sent: bool, count: int
) -> list[tuple[Message, ...]]:
    by_replica: list[list[Message]] = [[] for _ in range(count)]
    for message in messages:
        by_replica[place[message[0] if sent else message[1]]].append(message)
    return [tuple(part) for part in by_replica]


def _times_alone(
    works: Sequence[PipelineWork], work: PipelineWork, costs: CostTable, network: Network, layers: LayerCosts
) -> tuple[CostTable, ...]:
    """Return the times of every pipeline of `work`.

    Stages on devices of the same kinds, with equal rows and the same competing rings, are computed once.
    """
    beside, keys = (
        [_competing_groups(stage, network) for stage in work.stages],
        [stage_cost_key(stage, network) for stage in work.stages],
    )
    known: dict[object, list[StageCost]] = {}
    actions: dict[tuple[int, ...], Mapping[str, ActionTable]] = {}
    tables = []
    for k, pipeline in enumerate(works):
        columns = []
        for index, (stage, rings) in enumerate(zip(pipeline.stages, beside, strict=True)):
            kinds = tuple(network.kinds[device].name for device in stage.group.devices)
            key = (keys[index], kinds, stage.rows, stage.packed, rings[k])
            if key not in known:
                known[key] = stage_costs(stage, pipeline, network, layers, rings[k])
            columns.append(known[key])
        same = tuple(map(id, columns))
        if same not in actions:
            actions[same] = action_tables(columns, work.distinct_microbatches)
        edges = tuple(edge_times(edge, network) for edge in pipeline.edges)
        tables.append(replace(costs, actions=actions[same], edges=edges))
    return tuple(tables)


def _competing_groups(stage: StageWork, network: Network) -> list[RingTuples]:
    """Return for each replica the shard groups whose collectives compete with its own.

    They are its own groups and those of other replicas that use the same ports at about the same time.
    """
    if stage.group.find_axis("shard").size == 1:
        return [()] * stage.group.find_axis("replica").size
    rings = shard_rings(stage)
    ports = [_ring_ports(ring, network) for ring in rings]
    replica = [stage.group.axis_position(ring[0], "replica") for ring in rings]
    replica_ports: list[set[Port]] = [set() for _ in range(stage.group.find_axis("replica").size)]
    for k, used in zip(replica, ports, strict=True):
        replica_ports[k] |= used
    return [
        network.representative_rings(
            tuple(ring for ring, used in zip(rings, ports, strict=True) if not mine.isdisjoint(used))
        )
        for mine in replica_ports
    ]


def _ring_ports(ring: tuple[int, ...], network: Network) -> set[Port]:
    """Return the ports that a ring loads in either direction."""
    order = sorted(ring)
    hops = [*zip(order, (*order[1:], order[0]), strict=True)]
    return {port for a, b in (*hops, *((b, a) for a, b in hops)) for port, _ in network.port_loads(a, b, 1.0, 1.0)}


def _transfer_flow(messages: Sequence[Message], port_s: float, network: Network) -> _UnnumberedFlow | None:
    """Return the flow of messages that start together, or None if nothing moves."""
    if port_s <= 0.0:
        return None
    if len(messages) == 1:
        source, target, size = messages[0]
        links = network.port_loads(source, target, size, network.busy_s(source, target, size))
        return _UnnumberedFlow(dict(links), port_s, size / port_s, network.port_between(source, target))
    seconds: dict[Port, float] = defaultdict(float)
    queues = set()
    for source, target, size in messages:
        if source != target and size:
            links = network.port_loads(source, target, size, network.busy_s(source, target, size))
            for port, load_s in links:
                seconds[port] += load_s
            queues.add(network.port_between(source, target))
    largest = max(size for _, _, size in messages)
    return _UnnumberedFlow(dict(seconds), port_s, largest / port_s, queues.pop() if len(queues) == 1 else None)


def _reduction_flows(
    index: int, stage: StageWork, work: PipelineWork, network: Network, costs: CostTable
) -> dict[FlowKey, _UnnumberedFlow]:
    """Return the reduction of a stage, and its all-gather under ZeRO-1, as flows.

    The sum of the pieces over groups that shard the state is a part of the reduction.
    """
    if len(stage.data_shares) * stage.row_parts == 1:
        return {}
    width = GRADIENT_BYTES[work.precision]
    operation, passes = ("reduce_scatter", 1) if stage.shards_state else ("all_reduce", 2)
    jobs: list[tuple[str, str, Sequence[Sequence[int]], int, float]] = [
        ("REDUCE", operation, rings, passes, float(elements) * width)
        for elements, rings in split_elements(stage, stage.reduced_elements, stage.reduced_spread)
        if len(rings[0]) > 1
    ]
    if stage.shards_state:
        jobs += [
            ("GATHER", "all_gather", rings, 1, float(elements) * COMPUTE_BYTES[work.precision])
            for elements, rings in split_elements(stage, stage.gathered_elements, stage.gathered_spread)
            if len(rings[0]) > 1
        ]
    if copies := copy_rings(stage):
        jobs.insert(1, ("REDUCE", "all_reduce", copies, 2, stage.copied_elements * width))
    once_s = {"REDUCE": float(costs.reduce_s[index]), "GATHER": float(costs.gather_s[index])}
    loads: dict[str, tuple[dict[Port, float], float]] = {}
    for kind, operation, job_rings, passes, total in jobs:
        more, hop_bytes = _hop_loads(network, operation, job_rings, total, passes)
        seconds, before = loads.get(kind, ({}, 0.0))
        loads[kind] = (
            {port: seconds.get(port, 0.0) + more.get(port, 0.0) for port in {**seconds, **more}},
            before + hop_bytes,
        )
    return {
        (kind, index, 0, 0): _UnnumberedFlow(seconds, once_s[kind], hop_bytes / once_s[kind], None)
        for kind, (seconds, hop_bytes) in loads.items()
        if once_s[kind] > 0.0 and hop_bytes > 0.0
    }


class _CollectiveShares:
    """The parts of the stages' actions spent in collectives; stages with equal costs are computed once."""

    def __init__(self, network: Network, layers: LayerCosts) -> None:
        self.network, self.layers = network, layers
        self.known: dict[object, list[Mapping[str, float]]] = {}

    def shares_of(self, stage: StageWork, work: PipelineWork, rings: RingTuples) -> list[Mapping[str, float]]:
        """Return `collective_shares` of a stage beside the collectives of these rings."""
        key: tuple[object, ...] = (stage_cost_key(stage, self.network), self.network.representative_rings(rings))
        if stage.context_parts > 1 or stage.expert_parts > 1 or stage.has_sharded_layers:
            key = (*key, stage.group)
        if key not in self.known:
            self.known[key] = collective_shares(stage, work, self.network, self.layers, rings)
        return self.known[key]


def _action_flows(
    index: int, pipeline: int, work: PipelineWork, beside: RingTuples, shares: _CollectiveShares
) -> dict[FlowKey, _UnnumberedFlow]:
    """Return the actions of a stage with collectives as flows: one ring at a time through each shard group (all shards
    of an expert axis are one), or without shards through each group of devices with parts of the same sequences.

    `beside` are the rings with concurrent collectives, which the times of the actions already include.
    """
    stage, network, competing = work.stages[index], shares.network, beside
    rings = shard_rings(stage)
    if stage.expert_parts > 1:  # one pipeline: these are all rings with concurrent collectives
        rings = beside = expert_rings(stage)
    elif stage.group.find_axis("shard").size == 1:
        if stage.context_parts == 1:
            return {}
        rings = beside = competing = context_rings(stage)
    _, loads = _loads_of(network, "all_gather", rings)
    slowest = max((load_s for _, load_s in _loads_of(network, "all_gather", beside)[1]), default=0.0)
    if slowest <= 0.0:
        return {}
    bytes_per_s = (1.0 - 1.0 / max(map(len, rings))) / slowest
    return {
        (kind, index, slice_, pipeline): _UnnumberedFlow(
            {port: part * load_s / slowest for port, load_s in loads}, 1.0, bytes_per_s, None
        )
        for slice_, parts in enumerate(shares.shares_of(stage, work, competing))
        for kind, part in parts.items()
        if part > 0.0
    }


def _hop_loads(
    network: Network, operation: str, rings: Sequence[Sequence[int]], total_bytes: float, passes: int
) -> tuple[dict[Port, float], float]:
    """Return (seconds of load of every port, bytes of one hop) for `passes` passes over `total_bytes`.

    In each pass a hop of a ring of n devices carries (n - 1)/n of the bytes. With two levels, a hop inside a host
    carries the exchange of the host's devices, and a hop between hosts the part of one device. The returned hop is then
    one between hosts.
    """
    seconds: dict[Port, float] = defaultdict(float)
    told = 0.0
    for level_rings, level_bytes in pass_levels(network, operation, rings, total_bytes):
        factor, loads = _loads_of(network, operation, level_rings)
        moved = passes * level_bytes * factor
        told = told or next((len(ring) - 1) / len(ring) * moved for ring in level_rings)
        for port, load_s in loads:
            seconds[port] += moved * load_s
    return dict(seconds), told


def _loads_of(
    network: Network, operation: str, rings: Sequence[Sequence[int]]
) -> tuple[float, list[tuple[Port, float]]]:
    """Return (factor of bytes moved relative to a plain ring, [(port, seconds)]).

    The seconds are the port's load by one pass of plain rings, per byte of the full tensor.
    """
    key = operation, tuple(map(tuple, rings))
    if key not in network.hops:
        seconds: dict[Port, float] = defaultdict(float)
        for ring in rings:
            members = sorted(ring, reverse=runs_backwards(network, operation))
            part = (len(ring) - 1) / len(ring)
            for source, target in zip(members, (*members[1:], members[0]), strict=True):
                link_s = part / network.find_link(source, target).bandwidth_bytes_per_s
                for port, load_s in network.port_loads(source, target, part, link_s):
                    seconds[port] += load_s
        longest = max(map(len, rings), default=1)
        _, factor = network.collective_factors(operation, longest, network.stays_in_hosts(rings))
        network.hops[key] = factor, list(seconds.items())
    return network.hops[key]


def _number_ports(
    tables: tuple[CostTable, ...], loads: dict[FlowKey, _UnnumberedFlow], lanes: Mapping[FlowKey, int]
) -> PortContention:
    """Return the flows with numbered ports; only ports used by several flows get a number.

    Flows of the same lane (`lanes`) are never concurrent, or already account for each other. Flows that neither share a
    port nor have a queue are omitted.
    """
    users: dict[Port, set[object]] = defaultdict(set)
    for key, load in loads.items():
        for port in load.seconds:
            users[port].add(lanes.get(key, key))
    numbers = {port: number for number, port in enumerate(port for port, sharers in users.items() if len(sharers) > 1)}
    queues: dict[Port, int] = {}
    flows = {}
    for key, load in loads.items():
        shared = [(port, s) for port, s in load.seconds.items() if s > 0.0 and port in numbers]
        if not shared and load.queue is None:
            continue
        flows[key] = PortFlow(
            ports=tuple([numbers[port] for port, _ in shared]),
            use=tuple([min(1.0, s / load.duration_s) for _, s in shared]),
            bytes_per_s=load.bytes_per_s,
            queue=-1 if load.queue is None else queues.setdefault(load.queue, len(queues)),
        )
    return PortContention(tables, flows, len(numbers), len(queues))
