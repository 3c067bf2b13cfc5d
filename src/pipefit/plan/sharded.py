"""The programs of a module's layers over a shard axis: one graph per layer and position, each distinct graph once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipefit.codec import digest
from pipefit.errors import PlanError
from pipefit.layout import Form
from pipefit.model.graph import Graph, Model, Module
from pipefit.plan.decisions import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProgram:
    """What the devices of a shard axis run for one layer."""

    graphs: tuple[Graph, ...]
    "One per position of the shard axis; one entry where nothing is sharded."
    parameters: Mapping[str, Form]
    "Local parameter name -> form along the shard axis."
    takes: Form
    "Form of the hidden state along the shard axis as the layer takes it."
    gives: Form
    "And as it hands it on."


def layer_programs(
    model: Model, module: Module, sharding: Sharding, shares: Sequence[int]
) -> Mapping[str, LayerProgram]:
    """The program of every distinct graph of a module, by the graph's key.

    `shares` are those of the shard axis. Raises PlanError where the sharding cannot be made (heads or hidden size
    that the shares do not divide).
    """
    keys = dict.fromkeys(layer.graph for layer in module.layers)
    if len(shares) == 1:
        return {key: _whole(model.graphs[key]) for key in keys}
    return {key: _megatron(model.graphs[key], tuple(shares), sharding == "megatron-sp") for key in keys}


def program_hash(programs: Sequence[LayerProgram]) -> str:
    """The digest of a stage's programs in layer order: ranks with equal digests run the same thing."""
    return digest([[graph.hash for graph in program.graphs] for program in programs])


def _whole(graph: Graph) -> LayerProgram:
    whole = Form("I")
    forms = {parameter.name: whole for parameter in graph.parameters}
    return LayerProgram(graphs=(graph,), parameters=forms, takes=whole, gives=whole)


def _megatron(graph: Graph, shares: tuple[int, ...], sequence_parallel: bool) -> LayerProgram:
    from pipefit.shard.megatron import shard_program

    sharded = shard_program(graph, shares, sequence_parallel)
    if len(sharded.graphs) != len(shares):
        raise PlanError("The sharded program has a wrong number of positions.", where="sharding")
    return LayerProgram(
        graphs=tuple(sharded.graphs),
        parameters=dict(sharded.parameter_forms),
        takes=sharded.input_form,
        gives=sharded.output_form,
    )
