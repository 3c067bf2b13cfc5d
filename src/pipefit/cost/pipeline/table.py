"""The cost table of a full pipeline, from which schedules are built and on which the simulator runs.

The devices of a lane run in step, so a lane's times and bytes are the largest over its replicas and shard positions.
If device kinds hold different amounts, the table also contains the bytes of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import fsum, prod

import numpy as np

from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import stage_overhead_s
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.operator_times import SILENT, CollectiveTime, free_collective
from pipefit.cost.compute.packed_rows import packed_costs
from pipefit.cost.compute.roofline import LayerCost, LayerCosts, without_backward
from pipefit.cost.memory.lanes import lane_limits, lane_parts, lanes_differ, state_shares
from pipefit.cost.memory.stage import stage_memory
from pipefit.cost.memory.step_end import end_bytes, reduce_copy_bytes, stage_state_share
from pipefit.cost.pipeline.context_traffic import add_context_traffic, context_symbols, split_rings
from pipefit.cost.pipeline.edges import edge_cost, with_buffers
from pipefit.cost.pipeline.expert_traffic import collective_key, exchange_rings, stage_collective
from pipefit.cost.pipeline.overlap import LayerGradient, delay_pieces
from pipefit.cost.pipeline.reductions import gather_s, hidden_reduction_s, reduce_s
from pipefit.cost.pipeline.rings import context_rings, expert_rings, grid_positions, shard_rings
from pipefit.cost.pipeline.stage_cost import StageCost, action_tables, kv_gradient_table, worst_stage
from pipefit.cost.pipeline.state_traffic import add_state_traffic, state_traffic
from pipefit.cost.pipeline.turns import add_turn_costs
from pipefit.cost.static_memory import GRADIENT_BYTES, optimizer_traffic_bytes
from pipefit.cost.types import Array, CostTable, KindMemory
from pipefit.cost.work import PipelineWork, StageWork
from pipefit.layout import split_by_shares
from pipefit.model.graph import Graph
from pipefit.precision import Precision

SUMMED_LATER = 2
"""Layers of a backward after which the sum of a sharded layer's gradients is complete (`run/update/reduce.py`)."""

ACTION_OVERHEAD_S = 20e-6
"""Assumed interpreter overhead per action in the run, beside the operators."""

NOTES = (
    "links: latency + bytes / bandwidth of the very link; messages that leave one port together share it",
    "reductions: ring or two-level all-reduce over the very group, bucket by bucket",
    f"interpreter overhead {ACTION_OVERHEAD_S * 1e6:.0f} us an action: assumed",
    "static memory: parameters, gradients, {optimizer} state and 64 MiB of workspace (assumed) per device",
)


def cost_table(work: PipelineWork, network: Network, layers: LayerCosts) -> CostTable:
    """Return all costs of one iteration. `layers` gives compute and activations, `network` everything else."""
    keys = [stage_cost_key(stage, network) for stage in work.stages]
    of_each: dict[object, list[Mapping[str, StageCost]]] = {}
    beside: dict[object, tuple[float, Mapping[str, Sequence[LayerGradient]]]] = {}
    for key, stage in zip(keys, work.stages, strict=True):
        if key not in of_each:
            of_each[key] = _stage_columns(stage, work, network, layers)
            beside[key] = overlap_share(stage, work, network, layers)
    by_kind = [of_each[key] for key in keys]
    statics = lane_parts(work)
    worst = [[worst_stage(entry.values()) for entry in row] for row in by_kind]
    summed_s = np.array([reduce_s(stage, work, network) for stage in work.stages])
    hidden = [
        hidden_reduction_s(once_s, stage, work, network, beside[key])
        for once_s, stage, key in zip(summed_s.tolist(), work.stages, keys, strict=True)
    ]
    costs = CostTable(
        actions=action_tables(worst, work.distinct_microbatches),
        edges=tuple(edge_cost(edge, network) for edge in work.edges),
        reduce_s=summed_s + _tied_s(work, network),
        reduce_hidden_s={kind: np.array([entry[kind] for entry in hidden]) for kind in ("B", "W")},
        gather_s=np.array([gather_s(stage, work, network) for stage in work.stages]),
        step_s=np.array([_step_s(lane, work, network) for lane in range(work.num_lanes)]),
        static_bytes=np.array([fsum(parts.values()) for parts in statics]),
        kv_gradient_bytes=kv_gradient_table(worst, work.distinct_microbatches),
        reduce_copy_bytes=np.array(reduce_copy_bytes(work, network.over_gloo)),
        overhead_s=ACTION_OVERHEAD_S + stage_overhead_s(network.cluster),
        receives_ahead=network.over_gloo,
        notes=(
            *_cost_provenance(network),
            *layers.notes,
            *(note.format(optimizer=work.optimizer.title) for note in NOTES),
        ),
    )
    costs = add_turn_costs(costs, work, network)
    if not lanes_differ(work, network):
        return costs
    kinds = tuple(_kind_memory(name, costs, by_kind, work, network) for name in network.cluster.kinds)
    return replace(costs, kinds=kinds)


def slice_places(slices: Sequence[int]) -> list[tuple[int, int]]:
    """Return (tokens, tokens before it) of every slice."""
    return [(tokens, sum(slices[:index])) for index, tokens in enumerate(slices)]


def stage_cost(
    stage: StageWork,
    tokens: int,
    past: int,
    work: PipelineWork,
    network: Network,
    layers: LayerCosts,
    rings: tuple[tuple[int, ...], ...] | None = None,
) -> StageCost:
    """Return the sums over the stage's layers on the worst device of its mesh.

    `rings`: the shard groups with concurrent collectives; None: the stage's own.
    """
    return worst_stage(_stage_costs(stage, tokens, past, work, network, layers, rings).values())


def stage_costs(
    stage: StageWork,
    work: PipelineWork,
    network: Network,
    layers: LayerCosts,
    rings: tuple[tuple[int, ...], ...] | None = None,
) -> list[StageCost]:
    """Return `stage_cost` of every slice, or of every microbatch if they differ."""
    return [worst_stage(column.values()) for column in _stage_columns(stage, work, network, layers, rings)]


def _stage_columns(
    stage: StageWork,
    work: PipelineWork,
    network: Network,
    layers: LayerCosts,
    rings: tuple[tuple[int, ...], ...] | None = None,
) -> list[Mapping[str, StageCost]]:
    """Return the worst cost per device kind for every slice, or for every microbatch if they differ."""
    if not stage.packed:
        places = slice_places(stage.slices)
        return [_stage_costs(stage, tokens, past, work, network, layers, rings) for tokens, past in places]
    by_microbatch = packed_costs(
        stage, lambda equal: _stage_costs(equal, equal.slices[0], 0, work, network, layers, rings)
    )
    return [{kind: StageCost(*costs) for kind, costs in by_kind.items()} for by_kind in by_microbatch]


def collective_shares(
    stage: StageWork,
    work: PipelineWork,
    network: Network,
    layers: LayerCosts,
    rings: tuple[tuple[int, ...], ...] | None = None,
) -> list[Mapping[str, float]]:
    """Return, per slice, the part of each action's time (F, I, W and B) spent in collectives over the shard axis.

    If microbatches differ, an average microbatch is used. The arguments are those of `stage_cost`.
    """
    shares: list[Mapping[str, float]] = []
    for tokens, past in slice_places(stage.slices):
        total, rest = (
            worst_stage(_stage_costs(stage, tokens, past, work, network, layers, rings, silent).values())
            for silent in (False, True)
        )
        pairs = {
            "F": (total.forward_s, rest.forward_s),
            "I": (total.input_s, rest.input_s),
            "W": (total.weight_s, rest.weight_s),
            "B": (total.backward_s, rest.backward_s),
        }
        shares.append({kind: 1.0 - rest_s / whole_s if whole_s else 0.0 for kind, (whole_s, rest_s) in pairs.items()})
    return shares


def layer_costs(
    stage: StageWork, precision: Precision, network: Network, layers: LayerCosts
) -> Mapping[str, list[LayerCost]]:
    """Return the cost of every layer of a stage for a full row of tokens, the worst over the devices of the mesh.

    Keys are device kinds, and '' for the worst over all kinds.
    """
    by_kind: dict[str, list[list[LayerCost]]] = {}
    for kind, costs in _costs_by_place(stage, sum(stage.slices), 0, precision, network, layers):
        by_kind.setdefault(kind, []).append(costs)
    worst = {kind: _worst_layers(places) for kind, places in by_kind.items()}
    return {**worst, "": _worst_layers([*worst.values()])}


def overlap_share(
    stage: StageWork, work: PipelineWork, network: Network, layers: LayerCosts
) -> tuple[float, Mapping[str, Sequence[LayerGradient]]]:
    """Return the overlap share of the stage's reduction, and the layers of its last backward.

    The share is the part of the reduction beside the last backward that costs nothing. If it is not 0, the mapping
    holds (bytes of gradients, seconds of backward) per layer for a last backward of kind B and W.
    """
    share = min(network.kinds[device].overlap for device in stage.group.devices)
    if not share or (stage.has_sharded_layers and not stage.state_group):
        return 0.0, {}
    by_place = [costs for _, costs in _costs_by_place(stage, stage.slices[0], 0, work.precision, network, layers)]
    worst = _worst_layers(by_place)
    width = GRADIENT_BYTES[work.precision]
    sizes = [max(_is_trainable(graph) for graph in graphs) * width for graphs in stage.layers]
    if stage.has_sharded_layers:
        sizes = delay_pieces([max(counts) * width for counts in stage.sharded_elements], SUMMED_LATER)
    times = {"B": [cost.backward_s for cost in worst], "W": [cost.weight_s for cost in worst]}
    return share, {kind: list(zip(sizes, seconds, strict=True)) for kind, seconds in times.items()}


def stage_cost_key(stage: StageWork, network: Network) -> object:
    """Return a key that is equal for stages with equal layer costs: equal graphs, device kinds and rows.

    With a shard axis its links matter, and its devices if groups have unlike devices or leave their hosts.
    """
    rings = shard_rings(stage) if stage.group.find_axis("shard").size > 1 else ()
    rings += expert_rings(stage) if stage.expert_parts > 1 else ()
    rings += context_rings(stage) if stage.context_parts > 1 else ()
    group = replace(stage.group, devices=network.representative_devices(stage.group.devices))
    devices_key: object = group
    if not rings or (stage.has_equal_shards and network.stays_in_hosts(rings)):
        places = zip(stage.group.devices, stage.group.axis_positions("replica").values(), strict=True)
        kinds = frozenset((network.kinds[device].name, stage.rows[replica]) for device, replica in places)
        devices_key = (kinds, network.representative_rings(rings))
    sharded: tuple[object, ...] = ()
    if stage.has_sharded_layers:
        sharded = (stage.sharded_state, stage.sharded_elements, stage.sharded_spread, group, stage.state_group)
        sharded += (stage.sharded_frozen, stage.sharded_frozen_spread) if stage.sharded_frozen else ()
    more = stage.symbols, stage.packed, stage.frozen, sharded
    return tuple(map(id, stage.layers)), devices_key, stage.slices, stage.recompute, stage.shares, *more


def _distinct_places(stage: StageWork, network: Network) -> list[tuple[int, int, int]]:
    """Return one (device, replica, shard position) for each combination of kind, rows and program."""
    names = [axis.name for axis in stage.group.axes]
    even = stage.has_equal_shards
    distinct: dict[object, tuple[int, int, int]] = {}
    for device, coordinates in grid_positions(stage.group):
        replica = coordinates[names.index("replica")] if "replica" in names else 0
        position = coordinates[names.index("shard")] if "shard" in names else 0
        key = (network.kinds[device].name, stage.rows[replica], 0 if even else position)
        distinct.setdefault(key, (device, replica, position))
    return list(distinct.values())


def _costs_by_place(
    stage: StageWork,
    tokens: int,
    past: int,
    precision: Precision,
    network: Network,
    layers: LayerCosts,
    rings: tuple[tuple[int, ...], ...] | None = None,
    silent: bool = False,
) -> Iterator[tuple[str, list[LayerCost]]]:
    """Yield (kind, the cost of every layer) for each distinct device of the mesh. `silent`: free collectives."""
    sharded = stage.group.find_axis("shard").size > 1
    rings = network.representative_rings(rings or shard_rings(stage)) if sharded else None
    exchanging = exchange_rings(stage, network)
    distinct_shares = {stage.shares_of(index) for index in range(len(stage.layers))}
    collectives: dict[tuple[int, ...], CollectiveTime | None] = dict.fromkeys(distinct_shares)
    if rings:
        collectives = {
            shares: free_collective if silent else stage_collective(network, rings, shares, exchanging)
            for shares in distinct_shares
        }
    earlier = sum(before < past for _, before in slice_places(stage.slices))
    later, parts = sum(stage.slices) - past - tokens, stage.context_parts
    context = split_rings(stage, network, silent)
    symbols, tokens = (*stage.symbols, *context_symbols(parts)), tokens // parts
    for device, replica, position in _distinct_places(stage, network):
        kind = network.kinds[device]
        sizes = MicrobatchShape(stage.part_rows(replica), tokens, past, tokens, earlier, 0, later, symbols)
        places, costs = {shares: _part_shape(stage, sizes, shares, position) for shares in collectives}, []
        known: dict[tuple[int, tuple[int, ...], bool], LayerCost] = {}
        for index, graphs in enumerate(stage.layers):
            shares, graph = stage.shares_of(index), graphs[min(position, len(graphs) - 1)]
            layer_key = id(graph), shares, index < stage.frozen
            if layer_key not in known:
                key, shape = SILENT if silent else collective_key(stage, rings, shares, exchanging), places[shares]
                query = LayerQuery(graph, shape, kind, precision, stage.recompute, collectives[shares], key)
                cost = add_context_traffic(layers.layer_cost(query), query, context, network)
                known[layer_key] = without_backward(cost) if index < stage.frozen else cost
            costs.append(known[layer_key])
        yield kind.name, costs


def _part_shape(stage: StageWork, full: MicrobatchShape, shares: Sequence[int], position: int) -> MicrobatchShape:
    """Return the shape with the part of its tokens and rows at one position of the shard axis."""
    start, stop = split_by_shares(full.tokens, shares)[position]
    first_row, last_row = split_by_shares(full.rows, shares)[position]
    first = None if stage.has_equal_shards else start
    return full._replace(own_tokens=stop - start, own_rows=last_row - first_row, own_first=first)


def _stage_costs(
    stage: StageWork,
    tokens: int,
    past: int,
    work: PipelineWork,
    network: Network,
    layers: LayerCosts,
    rings: tuple[tuple[int, ...], ...] | None = None,
    silent: bool = False,
) -> Mapping[str, StageCost]:
    """Return the worst cost of the stage's devices, by device kind."""
    by_kind: dict[str, list[StageCost]] = {}
    traffic = state_traffic(stage, work.precision, network)
    for kind, costs in _costs_by_place(stage, tokens, past, work.precision, network, layers, rings, silent):
        cost = StageCost(*_sum_layers(costs))
        by_kind.setdefault(kind, []).append(add_state_traffic(cost, costs, traffic) if traffic else cost)
    return {kind: worst_stage(device_costs) for kind, device_costs in by_kind.items()}


def _kind_memory(
    name: str,
    costs: CostTable,
    by_kind: Sequence[Sequence[Mapping[str, StageCost]]],
    work: PipelineWork,
    network: Network,
) -> KindMemory:
    """Return the memory of one device kind; lanes without such devices get the memory of all kinds."""
    kind_costs = [[entry.get(name) or worst_stage(entry.values()) for entry in row] for row in by_kind]
    members = frozenset(device for device, kind in enumerate(network.kinds) if kind.name == name)
    parts = lane_parts(work, network, name)
    table = replace(
        costs,
        actions=action_tables(kind_costs, work.distinct_microbatches),
        kv_gradient_bytes=kv_gradient_table(kind_costs, work.distinct_microbatches),
        edges=tuple(with_buffers(cost, edge, members) for cost, edge in zip(costs.edges, work.edges, strict=True)),
        static_bytes=np.array([fsum(entry.values()) for entry in parts]),
    )
    return KindMemory(
        name=name,
        devices=members,
        limit_bytes=np.array(lane_limits(work, network, name)),
        table=table,
        parts=parts,
        end_bytes=np.array(end_bytes(work, network.over_gloo, state_shares(work, network, name))),
    )


def _is_trainable(graph: Graph) -> int:
    return sum(prod(map(int, parameter.shape)) for parameter in graph.parameters if parameter.trainable)


def _worst_layers(by_place: Sequence[list[LayerCost]]) -> list[LayerCost]:
    """Return the worst cost of every layer over places."""
    if len(by_place) == 1:
        return by_place[0]
    known: dict[tuple[int, ...], LayerCost] = {}
    worst = []
    for costs in zip(*by_place, strict=True):
        key = tuple(map(id, costs))
        if key not in known:
            known[key] = _worst_cost(costs)
        worst.append(known[key])
    return worst


def _worst_cost(each: Sequence[LayerCost]) -> LayerCost:
    fullest = max(each, key=lambda cost: cost.passing.forward if cost.passing else 0)
    return LayerCost(
        forward_s=max(cost.forward_s for cost in each),
        input_s=max(cost.input_s for cost in each),
        weight_s=max(cost.weight_s for cost in each),
        fused_s=max(cost.backward_s for cost in each),
        saved_bytes=max(cost.saved_bytes for cost in each),
        pending_bytes=max(cost.pending_bytes for cost in each),
        passing=fullest.passing,
        kv_gradient_before_bytes=max(cost.kv_gradient_before_bytes for cost in each),
        kv_gradient_after_bytes=max(cost.kv_gradient_after_bytes for cost in each),
    )


def _sum_layers(each: Sequence[LayerCost]) -> tuple[float, ...]:
    memory = stage_memory(each)
    return (
        fsum(cost.forward_s for cost in each),
        fsum(cost.input_s for cost in each),
        fsum(cost.weight_s for cost in each),
        fsum(cost.backward_s for cost in each),
        memory.saved_bytes,
        memory.pending_bytes,
        *(memory.passing[kind] for kind in ("F", "I", "B", "W")),
        fsum(cost.kv_gradient_after_bytes for cost in each),
    )


def _tied_s(work: PipelineWork, network: Network) -> Array:
    """Return the seconds per stage to exchange the gradients of parameters shared with other stages."""
    total = np.zeros(len(work.stages))
    for tied in work.tied:
        if not tied.rings:
            total[list(tied.stages)] += network.transfer_time(tied.messages).whole_s
    return total


def _step_s(lane: int, work: PipelineWork, network: Network) -> float:
    total = 0.0
    for stage in work.stages:
        if stage.lane == lane:
            slowest = min(network.kinds[device].memory_bandwidth_bytes_per_s for device in stage.group.devices)
            elements = max(stage.parameters.trainable)
            moved = optimizer_traffic_bytes(elements, stage_state_share(stage), work.precision, work.optimizer)
            total += moved / slowest
    return total


def _cost_provenance(network: Network) -> tuple[str, ...]:
    cluster = network.cluster
    notes = [f"cluster {cluster.name}: {cluster.provenance.source}; {cluster.provenance.where}"]
    for kind in cluster.kinds.values():
        origin = f"{kind.provenance.source}; {kind.provenance.where}"
        known = kind.provenance.source == "measured"
        how = "from measured layers" if known else "assumed"
        if kind.product_traffic is not None:
            how = "for large products, measured by others or assumed; other kernels fitted to published runs"
        notes.append(f"device kind {kind.name}: {origin}; efficiency {kind.efficiency:.2g} {how}")
        beside = f"{kind.overlap:.0%} of the time beside the last backward is free" if kind.overlap else "none is free"
        origin = "assumed" if kind.product_traffic is None else "fitted to published runs"
        notes.append(f"reductions on {kind.name} beside a backward: {beside}: {origin}")
    return tuple(notes)
