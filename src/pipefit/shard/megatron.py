"""Megatron's tensor parallelism as one fixed shard program, with even or uneven shares.

Column-parallel linear layers, then attention by heads or pointwise operators, then a row-parallel linear layer and an
all-reduce (Shoeybi et al., 2019). With sequence parallelism the residual stream and its operators (norms, embedding,
head, loss, experts) are split along tokens, with an all-gather before the column layers and a reduce-scatter after the
row layer (Korthikanti et al., 2022). Without it they are replicated on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipefit.errors import PlanError
from pipefit.layout import IDENTITY, shard_form
from pipefit.model.graph import Graph, Operator
from pipefit.model.ops import KINDS
from pipefit.shard.choice import TOKENS, HeldForm, OperatorChoice
from pipefit.shard.program import ShardedGraph, labels_at, shard_graph
from pipefit.shard.rules import OperatorLabels


def shard_program(graph: Graph, shares: Sequence[int], sequence_parallel: bool) -> ShardedGraph:
    """Return the Megatron program of one layer over a shard axis with these shares.

    The hidden state between layers has form I, or G1 (tokens) with `sequence_parallel`. Raises PlanError if a device
    would get no head or no column.
    """
    if sequence_parallel and not any(TOKENS in tensor.shape for tensor in graph.inputs):
        raise PlanError(
            "Megatron's sequence parallelism needs a variable number of tokens; this model has a fixed number.",
            where="sharding",
            seen="megatron-sp",
            next_step="--fix sharding=searched",
        )
    stream = HeldForm(shard_form(1) if sequence_parallel else IDENTITY)
    columns = column_linears(graph)
    fed = {tensor.name for tensor in graph.inputs if tensor.role != "activation"}

    def choose_split(
        place: int, operator: Operator, labelled: OperatorLabels, held: Mapping[str, HeldForm]
    ) -> OperatorChoice | None:
        if place in columns:
            return OperatorChoice(KINDS[operator.kind].column_label, columns[place])
        if KINDS[operator.kind].is_attention:
            return OperatorChoice("heads", labelled.units["heads"])
        if sequence_parallel and operator.inputs[:1] and operator.inputs[0] in fed:
            return OperatorChoice("d1") if "d1" in labelled.outputs[0] else None
        return follow_split(operator, labelled, held)

    return shard_graph(graph, shares, stream, choose_split)


def follow_split(operator: Operator, labelled: OperatorLabels, held: Mapping[str, HeldForm]) -> OperatorChoice | None:
    """Return the choice that keeps the split of the first split input, or None if the operator cannot be split there.

    A linear layer with its input split along features becomes row-parallel by this rule.
    """
    for name, labels in zip(operator.inputs, labelled.inputs, strict=True):
        if name and labels is not None and held[name].form.kind == "G":
            dim = held[name].form.dim
            assert dim is not None
            label = labels[dim]
            if label is not None:
                return OperatorChoice(label, held[name].units)
    return None


def column_linears(graph: Graph) -> dict[int, int]:
    """Return the column-parallel linear layers: index of the operator -> number of units of its columns.

    They are the layers whose result reaches only linear layers and attention, through operators that do not mix
    features.
    """
    consumers: dict[str, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        for name in operator.inputs:
            consumers.setdefault(name, []).append(index)
    shapes = {tensor.name: tensor.shape for tensor in (*graph.inputs, *graph.tensors)}
    shapes |= {spec.name: spec.shape for spec in graph.parameters}
    columns = {}
    for index, operator in enumerate(graph.operators):
        label = KINDS[operator.kind].column_label
        if label:
            last = labels_at(shapes, operator).outputs[0].index(label)
            units = _units_downstream(graph, operator.outputs[0], last, consumers, shapes)
            if units:
                columns[index] = units
    return columns


def _units_downstream(
    graph: Graph, name: str, dim: int, consumers: Mapping[str, list[int]], shapes: Mapping[str, tuple[int | str, ...]]
) -> int:
    """Return the number of units into which all uses allow dimension `dim` of `name` to be cut, or 0 if none."""
    if name in graph.outputs or shapes[name][dim] == TOKENS:
        return 0
    result = 0
    for index in consumers.get(name, []):
        operator = graph.operators[index]
        labelled = labels_at(shapes, operator)
        labels = labelled.inputs[operator.inputs.index(name)]
        label = None if labels is None else labels[dim]
        # a norm would need a collective
        if label is None or (label in labelled.kinds and label in labelled.outputs[0]):
            return 0
        partners = [
            o
            for o, operand_labels in zip(operator.inputs, labelled.inputs, strict=True)
            if operand_labels and label in operand_labels
        ]
        if label in labelled.outputs[0] and any(
            _made_from_whole(graph, partner) for partner in partners if partner != name
        ):
            return 0
        if label in labelled.outputs[0] and not KINDS[operator.kind].is_attention:
            units = _units_downstream(graph, operator.outputs[0], labelled.outputs[0].index(label), consumers, shapes)
        else:
            size = shapes[name][dim]
            units = labelled.units.get(label, size if isinstance(size, int) else 0)
        if units == 0 or (result and units != result):
            return 0
        result = units
    return result


def _made_from_whole(graph: Graph, name: str) -> bool:
    """Return whether a value comes from a full one (hidden state, norm result) without a product or attention."""
    maker = next((operator for operator in graph.operators if name in operator.outputs), None)
    if maker is None or KINDS[maker.kind].is_norm:
        return maker is not None or any(tensor.name == name and tensor.role == "activation" for tensor in graph.inputs)
    if KINDS[maker.kind].makes_features:
        return False
    return any(_made_from_whole(graph, input_name) for input_name in maker.inputs if input_name)
