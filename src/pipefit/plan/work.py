"""From the parts of a plan to the work that costs are made from: graphs on groups, messages on links."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from pipefit.cost.memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.cost.work import EdgeWork, PipelineWork, StageWork, TiedWork
from pipefit.layout import IDENTITY, Axis, Form, Group, box_size, holding, moves, parse_form, split
from pipefit.model.graph import Layer, size_value
from pipefit.plan.sharded import Programs, check_handing, own_shares, sharding_key
from pipefit.plan.types import Edge, GroupPlan, Job, Plan, Space, Stage, Wire

Message = tuple[int, int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What of a plan decides its costs."""

    job: Job
    groups: tuple[GroupPlan, ...]
    spaces: tuple[Space, ...]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    placement: tuple[int, ...]
    microbatches: int
    slices: tuple[int, ...]
    split_state: tuple[bool, ...]
    "Of each stage: whether ZeRO-1 splits its optimizer state."


def parts_of(plan: Plan) -> Parts:
    """The parts of a plan that stands."""
    return Parts(
        job=plan.job,
        groups=plan.groups,
        spaces=plan.spaces,
        stages=plan.stages,
        edges=plan.edges,
        placement=plan.order.placement,
        microbatches=plan.order.microbatches,
        slices=plan.order.slices,
        split_state=tuple(
            any("Gflat" in parameter.state for parameter in plan.parameters if index in parameter.uses)
            for index in range(len(plan.stages))
        ),
    )


def pipeline_work(parts: Parts, programs: Programs) -> PipelineWork:
    """The work of every stage and edge. Raises PlanError where the plan names what the model does not have."""
    groups = [group.group() for group in parts.groups]
    spaces = {space.name: space for space in parts.spaces}
    stages = []
    uses: dict[str, list[tuple[int, int]]] = {}
    for index, stage in enumerate(parts.stages):
        group, space = groups[stage.group], spaces[stage.space]
        layers = programs.layers(stage.module, stage.layers)
        shares = group.axis("shard").shares
        made = [programs.program(layer, sharding_key(stage), shares) for layer in layers]
        check_handing(made, shares, f"stages[{index}]")
        stages.append(
            StageWork(
                lane=parts.placement[index],
                group=group,
                layers=tuple(program.graphs for program in made),
                rows=_rows(space, parts.microbatches, group),
                slices=_slices(space, parts),
                recompute=stage.recompute,
                parameters=programs.counts(layers, sharding_key(stage), shares),
                split_state=parts.split_state[index],
                shares=own_shares(made, shares),
            )
        )
        for name, count in programs.named(layers, sharding_key(stage), shares).items():
            if count.trainable:
                uses.setdefault(name, []).append((index, max(count.elements)))
    return PipelineWork(
        stages=tuple(stages),
        edges=tuple(_edge_work(edge, parts, groups, programs) for edge in parts.edges),
        tied=_tied_work(uses, parts, groups),
        precision=parts.job.precision,
    )


def _tied_work(
    uses: Mapping[str, Sequence[tuple[int, int]]], parts: Parts, groups: Sequence[Group]
) -> tuple[TiedWork, ...]:
    """The exchange of every set of stages that share parameters; `uses` gives (stage, elements on a device) by name."""
    elements: dict[tuple[int, ...], int] = {}
    for found in uses.values():
        if len(found) > 1:
            stages = tuple(stage for stage, _ in found)
            elements[stages] = elements.get(stages, 0) + max(count for _, count in found)
    width = GRADIENT_BYTES[parts.job.precision]
    result = []
    for stages, count in elements.items():
        held = [groups[parts.stages[stage].group] for stage in stages]
        messages = [
            (move.source, move.target, float(count * width))
            for one, other in itertools.permutations(held, 2)
            for move in moves((1,), one, (IDENTITY,) * len(one.axes), other, (IDENTITY,) * len(other.axes))
        ]
        result.append(TiedWork(stages=stages, messages=tuple(messages), elements=count))
    return tuple(result)


def _rows(space: Space, microbatches: int, group: Group) -> tuple[int, ...]:
    """Rows of one microbatch on each replica."""
    runs = split(space.rows // microbatches, group.axis("replica").shares)
    return tuple(stop - start for start, stop in runs)


def _slices(space: Space, parts: Parts) -> tuple[int, ...]:
    """Tokens of each slice of a row of this space: the job's own slices, or the same proportions of its length."""
    if space.tokens in (0, parts.job.sequence):
        return parts.slices
    return tuple(stop - start for start, stop in split(space.tokens, parts.slices))


def _edge_work(edge: Edge, parts: Parts, groups: list[Group], programs: Programs) -> EdgeWork:
    source, target = parts.stages[edge.source], parts.stages[edge.target]
    space = next(space for space in parts.spaces if space.name == source.space)
    layer = programs.layers(source.module, source.layers)[-1]
    rows = space.rows // parts.microbatches
    width = COMPUTE_BYTES[parts.job.precision]
    shapes = [_shape(layer, rows, tokens, programs) for tokens in _slices(space, parts)]
    ahead, back = groups[source.group], groups[target.group]
    return EdgeWork(
        source=edge.source,
        target=edge.target,
        tensor=edge.tensor,
        forward=tuple(_messages(shape, ahead, back, edge.forward, width) for shape in shapes),
        backward=tuple(_messages(shape, back, ahead, edge.gradient, width) for shape in shapes),
    )


def _shape(layer: Layer, rows: int, tokens: int, programs: Programs) -> tuple[int, ...]:
    """The global shape of what a layer hands on."""
    graph = programs.model.graphs[layer.graph]
    symbols = {"B": rows, "T": tokens}
    return tuple(size_value(size, symbols) for size in graph.tensor(graph.outputs[0]).shape)


@lru_cache(maxsize=4096)
def _sizes(shape: tuple[int, ...], axes: tuple[Axis, ...], forms: tuple[Form, ...], width: int) -> tuple[float, ...]:
    """Bytes that each place of a grid holds, in grid order."""
    grid = Group(axes=axes, devices=tuple(range(prod(axis.size for axis in axes))))
    return tuple(float(width * box_size(holding(shape, grid, forms, place))) for place in grid.devices)


def _messages(shape: tuple[int, ...], source: Group, target: Group, wire: Wire, width: int) -> tuple[Message, ...]:
    sent, received = [tuple(map(parse_form, texts)) for texts in (wire.wire, wire.received)]
    if source.axes == target.axes and sent == received:
        # Equal grids and forms: plain point-to-point between equal places, without comparing all boxes.
        return tuple(zip(source.devices, target.devices, _sizes(shape, source.axes, sent, width), strict=True))
    return tuple(
        (move.source, move.target, float(width * box_size(move.box)))
        for move in moves(shape, source, sent, target, received)
    )
