"""Expert parallelism: as one fixed shard program, and beside tensor parallelism as an axis of its own.

In the program rows and experts are split over the shard axis. Every device computes its own rows of a microbatch with
complete copies of all other parameters, as in data parallelism, and holds a run of the experts of each layer. Tokens
are sent to their experts and back (`moe_shard`: GShard, Lepikhin et al., 2020).

An expert axis beside the shard axis divides rows as replicas do, and the experts before the shards divide them. The
programs of its positions are equal, so one program is written, for a graph with one position's experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipefit.errors import PlanError
from pipefit.layout import TensorForm, shard_form, split_by_shares
from pipefit.model.graph import Graph, Operator, shapes_of, size_value
from pipefit.model.ops.moe import EXPERT_PARTS
from pipefit.shard.choice import HeldForm, OperatorChoice, follow_split, split_along
from pipefit.shard.program import ShardedGraph, labels_at, shard_graph
from pipefit.shard.rules import OperatorLabels

ROW_DIM, TOKEN_DIM = 0, 1
"""Dimensions of a hidden state along which its tokens are divided together with the experts."""


def expert_program(graph: Graph, shares: Sequence[int]) -> ShardedGraph:
    """Return the program of one layer over a shard axis with these shares. The hidden state has form G0 (rows).

    Raises PlanError if a device would get no expert.
    """
    fed = {tensor.name for tensor in graph.inputs if tensor.role != "activation"}

    def choose_split(
        place: int, operator: Operator, labelled: OperatorLabels, held: Mapping[str, HeldForm]
    ) -> OperatorChoice | None:
        if experts := split_experts(labelled, ROW_DIM):
            return experts
        if operator.inputs[:1] and operator.inputs[0] in fed:
            return split_along(labelled, ROW_DIM)
        return follow_split(operator, labelled, held)

    return shard_graph(graph, shares, HeldForm(shard_form(ROW_DIM)), choose_split)


def split_experts(labelled: OperatorLabels, dim: int) -> OperatorChoice | None:
    """Return the choice that divides experts together with this dimension of their tokens; None without experts."""
    label = _expert_label(labelled, dim)
    return OperatorChoice(label) if label else None


def expert_count(graph: Graph, dim: int = ROW_DIM) -> int:
    """Return the number of experts that a program can divide together with this dimension of their tokens: the fewest
    of any operator; 0 for a layer without experts."""
    shapes, counts = shapes_of(graph), []
    for operator in graph.operators:
        labelled = labels_at(shapes, operator)
        label = _expert_label(labelled, dim)
        for name, labels in zip(operator.inputs[1:], labelled.joint[label][0][1:] if label else (), strict=False):
            if labels is not None and label in labels:
                counts.append(size_value(shapes[name][labels.index(label)], {}))
    return min(counts, default=0)


def can_divide_experts(graph: Graph, shares: Sequence[int], dim: int) -> bool:
    """Return whether a layer has experts, and at least one for every device of a shard axis with these shares."""
    return all(start < stop for start, stop in split_by_shares(expert_count(graph, dim), shares))


def divide_experts(graph: Graph, parts: int, shares: Sequence[int]) -> tuple[Graph, dict[str, TensorForm]]:
    """Return the graph of one position of an expert axis with `parts` positions, and the forms along the axis of the
    parameters that it divides. `shares` are those of the shard axis.

    Raises PlanError unless the positions get equally many experts, and each of their devices at least one.
    """
    forms: dict[str, TensorForm] = {}
    operators, shapes = [], shapes_of(graph)
    for operator in graph.operators:
        labelled = labels_at(shapes, operator)
        if label := _expert_label(labelled, TOKEN_DIM):
            for name, labels in zip(operator.inputs, labelled.joint[label][0], strict=True):
                if name in {spec.name for spec in graph.parameters} and labels is not None and label in labels:
                    forms[name] = shard_form(labels.index(label))
            operator = replace(operator, attributes={**operator.attributes, EXPERT_PARTS: parts})
        operators.append(operator)
    experts = expert_count(graph, TOKEN_DIM)
    if experts and (experts % parts or any(start == stop for start, stop in split_by_shares(experts // parts, shares))):
        raise PlanError(
            "The experts of a layer do not divide among the devices of expert and tensor parallelism.",
            where="expert and shards",
            seen=f"{experts} experts for {parts} x {len(shares)} devices",
            allowed=f"a number of parts that divides {experts}, with an expert or more for each shard",
        )
    parameters = tuple(
        replace(spec, shape=_divide_dim(spec.shape, forms[spec.name].dim, parts)) if spec.name in forms else spec
        for spec in graph.parameters
    )
    return replace(graph, operators=tuple(operators), parameters=parameters), forms


def _divide_dim(shape: tuple[int, ...], dim: int | None, parts: int) -> tuple[int, ...]:
    return tuple(size // parts if index == dim else size for index, size in enumerate(shape))


def _expert_label(labelled: OperatorLabels, dim: int) -> str:
    """Return the label that an operator's tokens, its first input, share with its experts along this dimension."""
    for label, (inputs, _) in labelled.joint.items():
        tokens = inputs[0]
        if tokens is not None and tokens[dim] == label:
            return label
    return ""
