"""Collectives of context parallelism: attention gathers the keys and values of all parts of a sequence.

Each pass all-gathers keys and values over the devices that hold parts of the same sequences; the backward also
reduce-scatters their gradients. Nothing overlaps these collectives. Their memory belongs to the operator
(`model/ops/attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pipefit.cost.comm.collectives import Rings, all_gather_s, reduce_scatter_s
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.layer_query import LayerQuery
from pipefit.cost.compute.roofline import LayerCost
from pipefit.cost.pipeline.rings import context_rings
from pipefit.cost.static_memory import COMPUTE_BYTES
from pipefit.cost.work import StageWork
from pipefit.model.analysis.saved import Recompute, kept_values, operator_call
from pipefit.model.graph import Graph
from pipefit.model.ops.attention import CONTEXT_PARTS, gathered_sizes
from pipefit.model.ops.table import KINDS
from pipefit.precision import Precision


def gathered_bytes(
    graph: Graph, symbols: Mapping[str, int], recompute: Recompute, precision: Precision
) -> Iterator[tuple[float, int]]:
    """Yield (bytes of the complete keys or values, number of gathers of a forward and a backward) for the attention of
    a layer. Recomputed attention gathers once more."""
    width = COMPUTE_BYTES[precision]
    again = set(kept_values(graph, recompute, width).again)
    for index, operator in enumerate(graph.operators):
        if KINDS[operator.kind].is_attention:
            for size in gathered_sizes(operator_call(graph, operator, symbols, width)):
                yield float(size), 2 + (index in again)


def add_context_traffic(cost: LayerCost, query: LayerQuery, rings: Rings, network: Network) -> LayerCost:
    """Return the cost of a layer with the collectives of its attention over these rings, if there are any."""
    if not rings:
        return cost
    shape = query.shape
    symbols = {"B": shape.rows, "T": shape.tokens, "S": shape.own_tokens, "R": shape.own_rows, **dict(shape.symbols)}
    forward_s = backward_s = 0.0
    for size, gathers in gathered_bytes(query.graph, symbols, query.recompute, query.precision) if shape.rows else ():
        gather_s = all_gather_s(network, rings, size)
        forward_s += gather_s
        backward_s += (gathers - 1) * gather_s + reduce_scatter_s(network, rings, size)
    return replace(
        cost,
        forward_s=cost.forward_s + forward_s,
        input_s=cost.input_s + backward_s,
        fused_s=None if cost.fused_s is None else cost.fused_s + backward_s,
    )


def split_rings(stage: StageWork, network: Network, silent: bool = False) -> Rings:
    """Return the rings of devices that hold parts of the same sequences; none for complete sequences, or if
    collectives are free (`silent`)."""
    return () if silent or stage.context_parts == 1 else network.representative_rings(context_rings(stage))


def context_symbols(parts: int) -> tuple[tuple[str, int], ...]:
    """Return the symbols of graphs on a device that holds one of several parts of each sequence."""
    return ((CONTEXT_PARTS, parts),) if parts > 1 else ()
