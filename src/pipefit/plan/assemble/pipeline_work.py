"""From the parts of a plan to its work, from which costs are computed: graphs on meshes, messages on links."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.cost.work import EdgeWork, Message, PipelineWork, StageWork, TiedWork
from pipefit.layout import (
    IDENTITY,
    Mesh,
    MeshAxis,
    Run,
    TensorForm,
    box_size,
    held_box,
    parse_form,
    split_by_shares,
    transfer_moves,
)
from pipefit.model.graph import Layer, size_value
from pipefit.model.ops.attention import DOCUMENTS_APART
from pipefit.optimizers import find_optimizer
from pipefit.optimizers.sharded_state import ShardedState, shards_gradients, shards_parameters, state_of_forms
from pipefit.plan.assemble.packed_rows import edge_sizes, frozen_layers, packed_sizes, packed_symbols, stage_grouping
from pipefit.plan.assemble.shard_programs import (
    ProgramCache,
    ShardedCounts,
    StoredParameter,
    check_layer_shares,
    count_parameters,
    kept_state_bytes,
    layer_shares,
    sharding_key,
)
from pipefit.plan.request.expert_parts import splits_rows
from pipefit.plan.types import Edge, EdgeTransfer, Job, MeshPlan, Plan, SampleSpace, Stage
from pipefit.schedule.actions import RoundRobin

PAIRS = 256
"""Device pairs of two groups above which only the messages of the largest microbatch are computed; the rest are scaled
in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSkeleton:
    """The parts of a plan that determine its costs."""

    job: Job
    groups: tuple[MeshPlan, ...]
    spaces: tuple[SampleSpace, ...]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    placement: tuple[int, ...]
    microbatches: int
    slices: tuple[int, ...]
    sharded_state: tuple[ShardedState, ...]
    "For each stage, the state that its replicas shard."


def skeleton_from_plan(plan: Plan) -> PlanSkeleton:
    """Return the skeleton of a complete plan."""
    return PlanSkeleton(
        job=plan.job,
        groups=plan.groups,
        spaces=plan.spaces,
        stages=plan.stages,
        edges=plan.edges,
        placement=plan.order.placement,
        microbatches=plan.order.microbatches,
        slices=plan.order.slices,
        sharded_state=tuple(
            state_of_forms(form for parameter in plan.parameters if index in parameter.uses for form in parameter.state)
            for index in range(len(plan.stages))
        ),
    )


def pipeline_work(parts: PlanSkeleton, programs: ProgramCache) -> PipelineWork:
    """Return the work of every stage and edge. Raises PlanError if the plan names a module or layer that the model
    lacks."""
    groups = [group.to_mesh() for group in parts.groups]
    spaces = {space.name: space for space in parts.spaces}
    frozen = frozen_layers(programs.model)
    stages = []
    uses: dict[str, list[tuple[int, StoredParameter]]] = {}
    for index, stage in enumerate(parts.stages):
        group, space = groups[stage.group], spaces[stage.space]
        layers = programs.module_layers(stage.module, stage.layers)
        shares = group.find_axis("shard").shares
        key = sharding_key(stage, group)
        layer_programs = [programs.layer_program(layer, key, shares) for layer in layers]
        check_layer_shares(layer_programs, shares, f"stages[{index}]")
        replicas = group.find_axis("replica").shares
        named = programs.named_parameters(layers, key, shares)
        sharded = ShardedCounts()
        if shards_gradients(parts.sharded_state[index]):
            sharded = programs.sharded_counts(stage.module, layers, key, shares)
            if not shards_parameters(parts.sharded_state[index]):
                sharded = sharded._replace(frozen=(), frozen_spread=())
        stages.append(
            StageWork(
                lane=parts.placement[index],
                group=group,
                layers=tuple(program.graphs for program in layer_programs),
                rows=_replica_rows(stage, space, parts.microbatches, group),
                slices=_space_slices(space, parts),
                recompute=stage.recompute,
                parameters=count_parameters(named.values(), len(shares), parts.job),
                sharded_state=parts.sharded_state[index],
                sharded_elements=sharded.elements,
                sharded_spread=sharded.spread,
                sharded_frozen=sharded.frozen,
                sharded_frozen_spread=sharded.frozen_spread,
                shares=layer_shares(layer_programs, shares),
                symbols=(
                    *packed_symbols(
                        parts.spaces, parts.microbatches // stage.microbatch_multiple, max(replicas) / sum(replicas)
                    ),
                    *(((DOCUMENTS_APART, 1),) if parts.job.documents == "apart" else ()),
                ),
                packed=packed_sizes(space, parts.microbatches, replicas, stage_grouping(stage)),
                frozen=max(0, min(len(layers), frozen[stage.module] - stage.layers[0])),
                turns=stage.turns,
                state_group=stage.state_group,
                splits_rows=splits_rows(stage.sharding),
            )
        )
        for name, count in named.items():
            if count.trainable:
                uses.setdefault(name, []).append((index, count))
    return PipelineWork(
        stages=tuple(stages),
        edges=tuple(_edge_work(edge, parts, groups, programs) for edge in parts.edges),
        tied=_tied_work(uses, parts, groups),
        precision=parts.job.precision,
        optimizer=find_optimizer(parts.job.optimizer),
    )


def _tied_work(
    uses: Mapping[str, Sequence[tuple[int, StoredParameter]]], parts: PlanSkeleton, groups: Sequence[Mesh]
) -> tuple[TiedWork, ...]:
    """Return the exchange of every set of stages that share parameters; `uses` maps names to (stage, the parameter
    there)."""
    elements: dict[tuple[int, ...], int] = {}
    state_bytes: dict[tuple[int, ...], float] = {}
    for stage_elements in uses.values():
        if len(stage_elements) > 1:
            stages = tuple(stage for stage, _ in stage_elements)
            elements[stages] = elements.get(stages, 0) + max(max(stored.elements) for _, stored in stage_elements)
            state_size = kept_state_bytes([stage_elements[0][1]], parts.job)
            state_bytes[stages] = state_bytes.get(stages, 0.0) + state_size
    width = GRADIENT_BYTES[parts.job.precision]
    result = []
    for stages, count in elements.items():
        if all(parts.stages[stage].turns > 1 for stage in stages):
            rings = _shard_rings([groups[parts.stages[stage].group] for stage in stages])
            result.append(
                TiedWork(
                    stages=stages, messages=(), elements=count, shared_state_bytes=state_bytes[stages], rings=rings
                )
            )
            continue
        held = [groups[parts.stages[stage].group] for stage in stages]
        messages = [
            (move.source, move.target, float(count * width))
            for sender, receiver in itertools.permutations(held, 2)
            for move in transfer_moves(
                (1,), sender, (IDENTITY,) * len(sender.axes), receiver, (IDENTITY,) * len(receiver.axes)
            )
        ]
        result.append(
            TiedWork(stages=stages, messages=tuple(messages), elements=count, shared_state_bytes=state_bytes[stages])
        )
    return tuple(result)


def _shard_rings(groups: Sequence[Mesh]) -> tuple[tuple[int, ...], ...]:
    """Return, for each shard position, its devices in all groups."""
    shards = groups[0].find_axis("shard").size
    positions = [(device, group.axis_position(device, "shard")) for group in groups for device in group.devices]
    return tuple(tuple(device for device, shard in positions if shard == position) for position in range(shards))


def _replica_rows(stage: Stage, space: SampleSpace, microbatches: int, group: Mesh) -> tuple[int, ...]:
    """Return the rows per call on each replica. On a stage that divides images each replica has at least one packed
    row."""
    runs = split_by_shares(space.rows // (microbatches // stage.microbatch_multiple), group.find_axis("replica").shares)
    least = 1 if stage.divide == "images" else 0
    return tuple(max(least, stop - start) for start, stop in runs)


def _space_slices(space: SampleSpace, parts: PlanSkeleton) -> tuple[int, ...]:
    """Return the tokens of each slice of a row of this space.

    They are the job's slices, or the same proportions of the space's length. For unequal rows, they are those of a mean
    row.
    """
    if space.counts:
        return (round(sum(space.counts) / len(space.counts)),)
    if space.tokens in (0, parts.job.sequence):
        return parts.slices
    return tuple(stop - start for start, stop in split_by_shares(space.tokens, parts.slices))


def _edge_work(edge: Edge, parts: PlanSkeleton, groups: list[Mesh], programs: ProgramCache) -> EdgeWork:
    source, target = parts.stages[edge.source], parts.stages[edge.target]
    spaces = [next(space for space in parts.spaces if space.name == stage.space) for stage in (source, target)]
    layer = programs.module_layers(source.module, source.layers)[-1]
    width = COMPUTE_BYTES[parts.job.precision]
    ahead, back = groups[source.group], groups[target.group]
    packed = next((space for space in spaces if space.counts), None)
    if packed is not None:
        ragged = _packed_messages(edge, packed, parts, (ahead, back), _output_features(layer, programs), width)
        largest = max(ragged, key=lambda each: sum(size for _, _, size in each[0]))
        return EdgeWork(
            source=edge.source,
            target=edge.target,
            tensor=edge.tensor,
            forward=(largest[0],),
            backward=(largest[1],),
            ragged=ragged,
        )
    rows = spaces[0].rows // parts.microbatches
    shapes = [_output_shape(layer, rows, tokens, programs) for tokens in _space_slices(spaces[0], parts)]
    return EdgeWork(
        source=edge.source,
        target=edge.target,
        tensor=edge.tensor,
        forward=tuple(_edge_messages(shape, ahead, back, edge.forward, width) for shape in shapes),
        backward=tuple(_edge_messages(shape, back, ahead, edge.gradient, width) for shape in shapes),
    )


def _packed_messages(
    edge: Edge, packed: SampleSpace, parts: PlanSkeleton, groups: tuple[Mesh, Mesh], features: int, width: int
) -> tuple[tuple[tuple[Message, ...], tuple[Message, ...]], ...]:
    """Return the messages of every microbatch, forward and backward, where each replica holds the tokens of its samples
    or images.

    Microbatches that one of the two stages does not process have none.
    """
    ahead, back = groups
    ends = [parts.stages[stage] for stage in (edge.source, edge.target)]
    sizes = list(
        edge_sizes(packed, parts.microbatches, ahead, back, (stage_grouping(ends[0]), stage_grouping(ends[1])))
    )
    turns = [RoundRobin(stage.turn, stage.turns, stage.microbatch_multiple) for stage in ends]
    live = [all(turn.takes_microbatch(index) for turn in turns) for index in range(len(sizes))]
    exact = len(ahead.devices) * len(back.devices) <= PAIRS
    largest = max(itertools.compress(range(len(sizes)), live), key=lambda index: sizes[index][0])
    messages: dict[int, tuple[tuple[Message, ...], tuple[Message, ...]]] = {}
    for index, (total, (sent, received)) in enumerate(sizes):
        if not live[index]:
            messages[index] = ((), ())
        elif exact or index == largest:
            shape = (1, total, features)
            messages[index] = (
                _edge_messages(shape, ahead, back, edge.forward, width, (sent, received)),
                _edge_messages(shape, back, ahead, edge.gradient, width, (received, sent)),
            )
    largest_tokens = max(1, sizes[largest][0])
    return tuple(
        messages.get(index) or _scale_messages(messages[largest], total / largest_tokens)
        for index, (total, _) in enumerate(sizes)
    )


def _scale_messages(
    both: tuple[tuple[Message, ...], ...], part: float
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    ahead, back = (tuple((source, target, part * size) for source, target, size in direction) for direction in both)
    return ahead, back


def _output_features(layer: Layer, programs: ProgramCache) -> int:
    """Return the width of a layer's output."""
    graph = programs.model.graphs[layer.graph]
    return size_value(graph.find_tensor(graph.outputs[0]).shape[-1], {})


def _output_shape(layer: Layer, rows: int, tokens: int, programs: ProgramCache) -> tuple[int, ...]:
    """Return the global shape of a layer's output."""
    graph = programs.model.graphs[layer.graph]
    symbols = {"B": rows, "T": tokens}
    return tuple(size_value(size, symbols) for size in graph.find_tensor(graph.outputs[0]).shape)


@lru_cache(maxsize=4096)
def _position_bytes(
    shape: tuple[int, ...], axes: tuple[MeshAxis, ...], forms: tuple[TensorForm, ...], width: int
) -> tuple[float, ...]:
    """Return the bytes at each position of a grid, in grid order."""
    grid = Mesh(axes=axes, devices=tuple(range(prod(axis.size for axis in axes))))
    return tuple(float(width * box_size(held_box(shape, grid, forms, position))) for position in grid.devices)


def _edge_messages(
    shape: tuple[int, ...],
    source: Mesh,
    target: Mesh,
    wire: EdgeTransfer,
    width: int,
    replica_runs: tuple[Sequence[Run], Sequence[Run]] | None = None,
) -> tuple[Message, ...]:
    sent, received = [tuple(map(parse_form, texts)) for texts in (wire.wire, wire.received)]
    if source.axes == target.axes and sent == received and replica_runs is None:
        # Equal grids and forms: plain point-to-point between equal positions, without comparing all boxes.
        return tuple(zip(source.devices, target.devices, _position_bytes(shape, source.axes, sent, width), strict=True))
    return tuple(
        (move.source, move.target, float(width * box_size(move.box)))
        for move in transfer_moves(shape, source, sent, target, received, replica_runs=replica_runs)
    )
