"""Groups, stages, edges and parameters of a plan: everything but the order, from explicit decisions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipefit.errors import PlanError
from pipefit.model.graph import Module
from pipefit.plan.decisions import Decisions
from pipefit.plan.sharded import LayerProgram, Programs, program_hash
from pipefit.plan.types import AxisPlan, Edge, GroupPlan, Parameter, Stage, Wire


def make_groups(decisions: Decisions) -> tuple[GroupPlan, ...]:
    """One group per lane, always with the axes `replica` and `shard`, the shard axis fastest."""
    axes = (AxisPlan(name="replica", shares=decisions.replicas), AxisPlan(name="shard", shares=decisions.shards))
    return tuple(GroupPlan(axes=axes, devices=devices) for devices in decisions.lane_devices())


def make_stages(module: Module, decisions: Decisions, cuts: Sequence[int], programs: Programs) -> tuple[Stage, ...]:
    """The stages of one module, in chain order."""
    return tuple(
        Stage(
            module=module.name,
            layers=run,
            group=decisions.lane_of_stage[index],
            space=module.space,
            recompute=decisions.recompute_of(index),
            sharding=decisions.sharding,
            program=program_hash(
                [programs.program(layer, decisions.sharding, decisions.shards) for layer in module.layers[slice(*run)]]
            ),
        )
        for index, run in enumerate(pairwise((0, *cuts, len(module.layers))))
    )


def make_edges(
    module: Module, stages: Sequence[Stage], programs: Programs, shards: tuple[int, ...]
) -> tuple[Edge, ...]:
    """The hidden state from each stage to the next: rows split over replicas, the shard axis as the program says.

    The gradient is partial over the shard axis where the hidden state is whole on every shard (reference: HAP's
    duality of forms), and split where it is split.
    """
    edges = []
    for source, (one, two) in enumerate(pairwise(stages)):
        gives = programs.program(module.layers[one.layers[1] - 1], one.sharding, shards).gives
        takes = programs.program(module.layers[two.layers[0]], two.sharding, shards).takes
        if gives != takes:
            raise PlanError(
                "Neighbouring stages hold the hidden state in different forms.",
                where=f"cuts: layer {two.layers[0]}",
                seen=f"{gives} and {takes}",
                next_step="cut between layers that hand it over in one form",
            )
        back = "P" if gives.kind == "I" and len(shards) > 1 else str(gives)
        edges.append(
            Edge(source=source, target=source + 1, forward=_wire("G0", str(gives)), gradient=_wire("G0", back))
        )
    return tuple(edges)


def make_parameters(
    module: Module, stages: Sequence[Stage], programs: Programs, shards: tuple[int, ...], zero1: bool
) -> tuple[Parameter, ...]:
    """Every parameter once, in order of first use; a tied one has all the stages that use it, owned by the first.

    Under ZeRO-1 the state of what a device stores is split flat over the replicas.
    """
    uses: dict[str, list[int]] = {}
    facts: dict[str, tuple[tuple[int, ...], bool, str]] = {}
    for index, stage in enumerate(stages):
        for layer in module.layers[stage.layers[0] : stage.layers[1]]:
            program = programs.program(layer, stage.sharding, shards)
            for spec in program.graphs[0].parameters:
                name = layer.parameters[spec.name]
                fact = (_whole_shape(program, spec.name), spec.trainable, str(program.parameters[spec.name]))
                if facts.setdefault(name, fact) != fact:
                    raise PlanError(
                        "A tied parameter is stored differently by its two uses.",
                        where=f"parameter {name!r}, layer {layer.name!r}",
                        seen=f"{facts[name]} and {fact}",
                    )
                if index not in uses.setdefault(name, []):
                    uses[name].append(index)
    return tuple(
        Parameter(
            name=name,
            shape=facts[name][0],
            trainable=facts[name][1],
            uses=tuple(uses[name]),
            stored=("I", facts[name][2]),
            state=("Gflat" if zero1 else "I", facts[name][2]),
            owner=uses[name][0],
        )
        for name in uses
    )


def _whole_shape(program: LayerProgram, name: str) -> tuple[int, ...]:
    """The global shape: the sum of the positions' local ones along the split dimension."""
    shape = list(program.graphs[0].parameter(name).shape)
    form = program.parameters[name]
    if form.kind == "G" and form.dim is not None:
        shape[form.dim] = sum(graph.parameter(name).shape[form.dim] for graph in program.graphs)
    return tuple(shape)


def _wire(replica: str, shard: str) -> Wire:
    forms = (replica, shard)
    return Wire(sent=forms, wire=forms, received=forms)
