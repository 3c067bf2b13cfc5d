"""The sides of the proof of synthesized programs: ours, and baselines that are the same search with less allowed.

So every side has the same collectives, the same prices, the same devices, and the same overlap: reductions of whole
parameters' gradients hide under the backward bucket by bucket (`cost/pipeline/overlap.py`); all other collectives wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipefit.cost.pipeline.overlap import BUCKET_BYTES, hidden_s
from pipefit.cost.static_memory import GRADIENT_BYTES
from pipefit.errors import PlanError
from pipefit.model.graph import element_count
from pipefit.shard import frontier
from pipefit.shard.chain import ChainSearch
from pipefit.shard.pricing import PricedLayer
from pipefit.shard.shares import overlapped_reduction_s
from pipefit.shard.synthesize import SynthesizedProgram, synthesize_program
from pipefit.shard.template import held_fractions

Allowed = Callable[[PricedLayer, str, bool, int], bool]
"""(layer, value, whether it is a parameter, form by number) -> whether the side may hold it so."""


def rows_only(layer: PricedLayer, name: str, parameter: bool, form: int) -> bool:
    """Data parallelism: activations by rows, parameters whole."""
    if form in (frontier.REPLICATED, frontier.PARTIAL):
        return not parameter or form == frontier.REPLICATED
    return not parameter and is_split(form) and "B" in str(layer.shapes[name][form - 2])


def fully_sharded(layer: PricedLayer, name: str, parameter: bool, form: int) -> bool:
    """FSDP: the same, parameters stored split along their first dimension that can be."""
    if not parameter:
        return rows_only(layer, name, parameter, form)
    return form in (frontier.REPLICATED, stored(layer, name))


def stored(layer: PricedLayer, name: str) -> int:
    """The form in which FSDP stores a parameter."""
    able = [dim for dim in range(len(layer.shapes[name])) if (name, dim) in layer.cuts]
    return frontier.form_number_along(able[0]) if able else frontier.REPLICATED


def no_rows(layer: PricedLayer, name: str, parameter: bool, form: int) -> bool:
    """Tensor parallelism: anything but rows, and no parameter gathered."""
    return form in (frontier.REPLICATED, frontier.PARTIAL) or (
        is_split(form) and (parameter or "B" not in str(layer.shapes[name][form - 2]))
    )


def experts_too(experts: int) -> Allowed:
    """Data parallelism with expert parallelism: what has a dimension of experts may be split along it."""

    def allowed(layer: PricedLayer, name: str, parameter: bool, form: int) -> bool:
        if is_split(form) and layer.shapes[name][form - 2] == experts and len(layer.shapes[name]) > 2:
            return True
        return rows_only(layer, name, parameter, form)

    return allowed


def everything(layer: PricedLayer, name: str, parameter: bool, form: int) -> bool:
    """Ours."""
    return True


def is_split(form: int) -> bool:
    """Whether a form's number is that of a split."""
    return form >= 2 and form != frontier.EVERYWHERE


@dataclass
class Side(ChainSearch):
    """A search in which only some forms are allowed."""

    allowed: Allowed = everything
    gathers: bool = True
    "Whether parameters that are stored split may be gathered for use."

    def layer_template(self, graph: Any, takes: Any, pinned: Any) -> PricedLayer:
        layer = super().layer_template(graph, takes, pinned)
        parameters = {spec.name for spec in graph.parameters}

        def may(value: int, form: int) -> bool:
            name = layer.values[value]
            return self.allowed(layer, name, name in parameters, form)

        def is_stored(value: int) -> bool:
            return layer.values[value] in parameters

        def kept(value: int) -> int:
            name = layer.values[value]
            spread = [
                conversion
                for conversion in layer.template.conversion_costs[value]
                if conversion[0] == stored(layer, name)
            ]
            return stored(layer, name) if spread else frontier.REPLICATED

        steps, picks = [], []
        for step, each in zip(layer.template.steps, layer.picks, strict=True):
            keep = [
                place
                for place, way in enumerate(step.ways)
                if may(step.output, way.gives)
                and all(may(value, form) for value, form in zip(step.inputs, way.needs, strict=True))
                and (self.allowed is not fully_sharded or not is_stored(step.output) or way.gives == kept(step.output))
            ]
            steps.append(replace(step, ways=tuple(step.ways[place] for place in keep)))
            picks.append(tuple(each[place] for place in keep))
        conversions = tuple(
            {
                move: conversion
                for move, conversion in conversions.items()
                if may(value, move[0])
                and may(value, move[1])
                and (self.gathers or layer.values[value] not in parameters)
            }
            for value, conversions in enumerate(layer.template.conversion_costs)
        )
        return replace(
            layer,
            template=replace(layer.template, steps=tuple(steps), conversion_costs=conversions),
            picks=tuple(picks),
        )


@dataclass(frozen=True)
class Result:
    """One side's best program for a model."""

    step_s: float
    "With overlap."
    compute_s: float
    "Of the slowest device, without any collective."
    reduce_s: float
    "Gradient reductions, hidden or not."
    shares: tuple[int, ...]
    found: SynthesizedProgram | None = None


def best(
    model: Any,
    setting: Any,
    allowed: Allowed,
    shares: Sequence[int] = (),
    gathers: bool = True,
    between_s: float = 0.0,
) -> Result | None:
    """The fastest program of a side, overlap counted; None where none fits in memory. `between_s`: what summing all
    gradients with other groups takes, on top of the group's own reductions."""
    chains = Side(model, setting, allowed=allowed, gathers=gathers)
    try:
        return timed(model, setting, synthesize_program(chains, model.layers, tuple(shares)), between_s)
    except PlanError:
        return None


def timed(model: Any, setting: Any, found: SynthesizedProgram, between_s: float = 0.0) -> Result:
    """The step of a program with its gradient reductions hidden as the runtime hides them."""
    reduce_s, pieces, compute_s = 0.0, [], 0.0
    per_byte = setting.bucket_s / BUCKET_BYTES
    seen_s = 0.0
    for link, layer in zip(found.links, model.layers, strict=True):
        graph = model.layer_graph(layer)
        specs = {spec.name: spec for spec in graph.parameters}
        template = link.choice.template
        fractions = held_fractions(template.cuts, found.shares, setting.axis_members)
        kinds = range(setting.axis_members.kind_count)
        for step, number in zip(template.steps, link.choice.ways, strict=True):
            way = step.ways[number]
            spec = specs.get(link.layer.values[step.output])
            size = 0
            if spec is not None and spec.trainable:
                size = element_count(spec.shape, {}) * GRADIENT_BYTES[setting.precision]
            own = size if way.gives == frontier.REPLICATED else 0
            backward_s = max(way.backward_s(fractions, kind) for kind in kinds)
            compute_s += backward_s + max(way.forward_s(fractions, kind) for kind in kinds)
            pieces.append((float(size if between_s else own), backward_s))
            reduce_s += own * per_byte / setting.microbatches
            seen_s += way.once_s
    reduce_s += between_s
    chain = [link.choice for link in found.links]
    beside = setting.overlap_share * overlapped_reduction_s(
        chain, [link.shares for link in found.links], setting.bucket_s, setting.microbatches
    )
    blocking = found.cost_s + beside - seen_s
    hidden = setting.overlap_share * hidden_s(reduce_s, pieces) if reduce_s else 0.0
    return Result(blocking + reduce_s - hidden, compute_s, reduce_s, found.shares, found)


def bound_s(model: Any, setting: Any, shares: Sequence[int]) -> float:
    """Proportional shares and no communication: what all devices compute, every operator split by rows, updates of
    parameters split evenly."""
    chains = Side(model, setting, allowed=rows_only, gathers=False)
    total = 0.0
    for link, layer in zip(chains.search_programs(model.layers, shares), model.layers, strict=True):
        parameters = {spec.name for spec in model.layer_graph(layer).parameters}
        template = link.choice.template
        fractions = held_fractions(template.cuts, shares, setting.axis_members)
        each = [0.0] * setting.axis_members.kind_count
        for step, number in zip(template.steps, link.choice.ways, strict=True):
            way = step.ways[number]
            for kind in range(len(each)):
                seconds = way.forward_s(fractions, kind) + way.backward_s(fractions, kind)
                each[kind] += seconds / len(shares) if link.layer.values[step.output] in parameters else seconds
        total += max(each)
    return total
