"""Sums over a graph: FLOPs, FLOPs added by recomputation, and bytes that its operators read and write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipefit.model.analysis.saved import Recompute, analyse_graph, effective_recompute, element_bytes, operator_call
from pipefit.model.graph import Graph, Operator, Shape, size_value
from pipefit.model.ops.kind import Flops
from pipefit.model.ops.table import KINDS
from pipefit.model.ops.unshard import stored_weights


def infer_shapes(kind: str, inputs: tuple[Shape | None, ...], attributes: Mapping[str, Any]) -> tuple[Shape, ...]:
    """Output shapes of an operator from its input shapes (None for an absent optional input)."""
    return KINDS[kind].shapes(inputs, attributes)


def graph_flops(graph: Graph, symbols: Mapping[str, int]) -> Flops:
    """FLOPs of one forward and backward of `graph`, split into forward, input gradient (I) and weight gradient (W).

    `symbols` gives B and T, and P if earlier slices are attended to. Convention: see `kind.Flops`.
    """
    return sum((operator_flops(graph, operator, symbols) for operator in graph.operators), Flops())


def operator_flops(graph: Graph, operator: Operator, symbols: Mapping[str, int]) -> Flops:
    """FLOPs of one operator of `graph`, as FlopCounterMode counts them. Frozen parameters have no weight gradient;
    values computed from the step plan alone (pixels) have no gradient."""
    return _without_frozen(graph, operator, KINDS[operator.kind].flops(operator_call(graph, operator, symbols, 4)))


def executed_flops(graph: Graph, operator: Operator, symbols: Mapping[str, int]) -> Flops:
    """FLOPs that the kernels of one operator execute. Causal kernels skip hidden keys."""
    kind = KINDS[operator.kind]
    count = kind.executed_flops or kind.flops
    return _without_frozen(graph, operator, count(operator_call(graph, operator, symbols, 4)))


def _without_frozen(graph: Graph, operator: Operator, flops: Flops) -> Flops:
    """Return the FLOPs without the gradients that are not computed."""
    if flops.weight_gradient:
        weights = stored_weights(graph)
        read = [weights[name] for name in operator.inputs if name in weights]
        if read and not any(spec.trainable for spec in read):
            flops = replace(flops, weight_gradient=0)
        if made_from_data(graph, operator):
            flops = replace(flops, input_gradient=0)
    return flops


def made_from_data(graph: Graph, operator: Operator) -> bool:
    """Return whether no activation input of an operator needs a gradient: all of them are computed from the model's
    data."""
    if not any(tensor.role == "data" for tensor in graph.inputs):
        return False
    analysis = analyse_graph(graph, 4)
    return not any(analysis.needs_gradient(name) for name in operator.inputs if name not in analysis.parameters)


def recompute_flops(graph: Graph, symbols: Mapping[str, int], recompute: Recompute) -> int:
    """FLOPs that recomputation adds to a backward pass: one forward if the layer is fully recomputed, otherwise
    none."""
    if effective_recompute(graph, recompute) != "full":
        return 0
    return graph_flops(graph, symbols).forward


def graph_traffic_bytes(graph: Graph, symbols: Mapping[str, int], compute_bytes: int) -> int:
    """Bytes that a forward of `graph` reads and writes without fusion: every operator except views reads its inputs and
    parameters once and writes its outputs once."""
    return sum(operator_traffic_bytes(graph, operator, symbols, compute_bytes) for operator in graph.operators)


def operator_traffic_bytes(graph: Graph, operator: Operator, symbols: Mapping[str, int], compute_bytes: int) -> int:
    """Bytes that one operator reads and writes in its forward."""
    if KINDS[operator.kind].view:
        return 0
    names = [name for name in (*operator.inputs, *operator.outputs) if name]
    parameters = stored_weights(graph)
    total = 0
    for name in names:
        shape, width = _shape_and_width(graph, parameters, name, compute_bytes)
        count = 1
        for size in shape:
            count *= size_value(size, symbols)
        total += count * width
    if KINDS[operator.kind].is_lookup:
        weight = parameters[operator.inputs[1]]
        rows = operator_call(graph, operator, symbols, compute_bytes).inputs[0]
        assert rows is not None
        read = weight.shape[1]
        for size in rows:
            read *= size
        total += (read - weight.shape[0] * weight.shape[1]) * compute_bytes
    return total


def _shape_and_width(graph: Graph, parameters: Mapping[str, Any], name: str, compute_bytes: int) -> tuple[Shape, int]:
    if name in parameters:
        return parameters[name].shape, compute_bytes
    tensor = graph.find_tensor(name)
    return tensor.shape, element_bytes(tensor.dtype, compute_bytes)
