"""The work of one layer on an emulated device, by the sizes of its action: its time by the device's table, and its
number of collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipefit.cost.compute.shard_exchanges import operator_exchanges
from pipefit.cost.pipeline.context_traffic import gathered_bytes
from pipefit.lab.tables import DeviceTable, LayerFacts
from pipefit.model.analysis.saved import effective_recompute, kept_values
from pipefit.model.analysis.totals import graph_flops, graph_traffic_bytes, operator_flops
from pipefit.model.ops import KINDS
from pipefit.model.ops.attention import CONTEXT_PARTS
from pipefit.model.ops.packed_attention import SQUARES

_TRAFFIC = {"F": 1.0, "I": 1.5, "W": 0.7}
"""Memory traffic of an action relative to the forward pass."""


def stage_layer_s(
    table: DeviceTable, graph: Any, kind: str, sizes: Mapping[str, int], recompute: Any = "none"
) -> float:
    """Return the seconds of one layer in an action on the emulated device. `sizes` are B, T, P and S of the graph."""
    facts = layer_facts(graph, sizes)
    seconds = table.layer_time_s(kind, facts)
    if kind in "BI" and effective_recompute(graph, recompute) == "full":
        seconds += table.layer_time_s("F", facts)
    return seconds


def exchange_count(graph: Any, kind: str, sizes: Mapping[str, int], recompute: Any = "none") -> int:
    """Return the number of collectives over the shard axis and the context axis that a layer runs in an action."""
    exchanges = [operator_exchanges(graph, operator, sizes, "float32") for operator in graph.operators]
    again = sum(len(exchanges[index].forward) for index in kept_values(graph, recompute, 4).again)
    counts = {
        "F": sum(len(exchange.forward) for exchange in exchanges),
        "I": sum(len(exchange.input_gradient) for exchange in exchanges) + again,
        "W": sum(len(exchange.weight_gradient) for exchange in exchanges),
    }
    if sizes.get(CONTEXT_PARTS, 1) > 1:
        for _, gathers in gathered_bytes(graph, sizes, recompute, "float32"):
            counts["F"] += 1
            counts["I"] += gathers  # one less than with the forward, and the sum of the gradients
    return counts["I"] + counts["W"] if kind == "B" else counts[kind]


def layer_facts(graph: Any, sizes: Mapping[str, int]) -> dict[str, LayerFacts]:
    """Return the work of a layer for each of F, I and W. A layer whose parameters are all frozen has no W."""
    total = graph_flops(graph, sizes)
    attention_operators = [op for op in graph.operators if KINDS[op.kind].is_attention]
    attention = [operator_flops(graph, op, sizes) for op in attention_operators]
    causal = bool(attention_operators) and all(op.attributes.get("causal", False) for op in attention_operators)
    tokens = sizes["B"] * sizes["T"]
    frozen = bool(graph.parameters) and not any(spec.trainable for spec in graph.parameters)
    context = (sizes["P"] + sizes["T"]) * sizes.get(CONTEXT_PARTS, 1)
    hidden = (context - 1 if CONTEXT_PARTS in sizes else sizes["T"] - 1) / 2 / context
    if SQUARES in sizes:
        context = sizes[SQUARES] // max(1, tokens)
    traffic = graph_traffic_bytes(graph, sizes, 4)
    result = {}
    for kind, field in (("F", "forward"), ("I", "input_gradient"), ("W", "weight_gradient")):
        inner = float(sum(getattr(flops, field) for flops in attention))
        result[kind] = LayerFacts(
            dense_flops=getattr(total, field) - inner,
            attention_flops=inner,
            traffic_bytes=_TRAFFIC[kind] * traffic,
            tokens=0 if frozen and kind == "W" else tokens,
            context=context,
            masked=hidden if causal else 0.0,
        )
    return result
