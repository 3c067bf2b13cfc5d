"""Collectives over the shard axis for one operator, by pass.

They are the collectives between operators, the all-gather of sharded parameters with the reduction of their gradients,
and the collectives inside operators. Layer times include them (`cost/compute/roofline.py`), and the report counts their
bytes on the links (`show/traffic.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.model.analysis.saved import operator_call
from pipefit.model.graph import Graph, Operator, element_count, size_value
from pipefit.model.ops import KINDS
from pipefit.model.ops.exchange import lowering_of
from pipefit.model.ops.kind import Said
from pipefit.model.ops.reshare import KIND as RESHARE
from pipefit.model.ops.reshare import shares_of
from pipefit.model.ops.unshard import gathers_of, stored_weights
from pipefit.precision import Precision

BACKWARD_COLLECTIVE = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}
"""Forward collective -> its collective in the backward pass; `shard_slice` moves nothing between devices."""


class OperatorExchanges(NamedTuple):
    """The collectives of one operator by pass, each (kind, bytes of the full tensor, lowering, units)."""

    forward: tuple[Said, ...] = ()
    input_gradient: tuple[Said, ...] = ()
    weight_gradient: tuple[Said, ...] = ()


NO_EXCHANGES = OperatorExchanges()


def operator_exchanges(
    graph: Graph, operator: Operator, symbols: Mapping[str, int], precision: Precision
) -> OperatorExchanges:
    """Return the collectives of an operator for these sizes."""
    if operator.kind == "unshard":
        return _unshard_exchanges(graph, operator, precision)
    if operator.kind == RESHARE:
        return _reshare_exchange(graph, operator, symbols, precision)
    if operator.kind in BACKWARD_COLLECTIVE:
        return _between_operators(graph, operator, symbols, precision)
    talks = KINDS[operator.kind].talks
    if talks is None:
        return NO_EXCHANGES
    talk = talks(operator_call(graph, operator, symbols, COMPUTE_BYTES[precision]))
    return OperatorExchanges(talk.forward, talk.input_gradient, talk.weight_gradient)


def _between_operators(
    graph: Graph, operator: Operator, symbols: Mapping[str, int], precision: Precision
) -> OperatorExchanges:
    """Return a collective between operators, with its backward."""
    elements, units = _moved_elements(graph, operator, symbols)
    total_bytes = float(elements * COMPUTE_BYTES[precision])
    ahead, back = lowering_of(operator)
    return OperatorExchanges(
        forward=((operator.kind, total_bytes, ahead, units),),
        input_gradient=((BACKWARD_COLLECTIVE[operator.kind], total_bytes, back, units[::-1]),),
    )


def _reshare_exchange(
    graph: Graph, operator: Operator, symbols: Mapping[str, int], precision: Precision
) -> OperatorExchanges:
    """Return the exchange that changes the shares of a split dimension; `units` hold the old and the new shares."""
    (old, new), attributes = shares_of(operator), operator.attributes
    shape = graph.find_tensor(operator.outputs[0]).shape
    full_shape = (*shape[: attributes["dim"]], attributes["whole"], *shape[attributes["dim"] + 1 :])
    size = float(element_count(full_shape, symbols) * COMPUTE_BYTES[precision])
    there, back = ((RESHARE, size, "alltoallv", shares) for shares in ((*old, *new), (*new, *old)))
    return OperatorExchanges(forward=(there,), input_gradient=(back,))


def _moved_elements(graph: Graph, operator: Operator, symbols: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
    """Return the elements of the full tensor, and the units of the split dimension.

    An all_to_all has the units of the source and the target dimension, an all_reduce none.
    """
    shapes = [graph.find_tensor(name).shape for name in (operator.inputs[0], operator.outputs[0])]
    units: tuple[int, ...] = ()
    if operator.kind == "all_to_all":
        old, new = operator.attributes["from"], operator.attributes["dim"]
        shapes[0] = tuple(shapes[1][dim] if dim == old else size for dim, size in enumerate(shapes[0]))
        units = (
            operator.attributes["from_units"] or size_value(shapes[0][old], symbols),
            operator.attributes.get("units") or size_value(shapes[0][new], symbols),
        )
    elif operator.kind != "all_reduce":
        whole_shape = shapes[1 if operator.kind == "all_gather" else 0]
        units = (operator.attributes.get("units") or size_value(whole_shape[operator.attributes["dim"]], symbols),)
    return max(element_count(shape, symbols) for shape in shapes), units


def _unshard_exchanges(graph: Graph, operator: Operator, precision: Precision) -> OperatorExchanges:
    """Return the collectives of a sharded parameter.

    It is gathered in the forward and, if the input gradient needs it, again in the backward. Its gradient is reduced in
    every microbatch, with the weight gradient. If autograd keeps the gathered weight, there is one gather, and the
    gradient is reduced with the input gradient.
    """
    name = operator.outputs[0]
    weight = stored_weights(graph)[name]
    elements, times = float(element_count(weight.shape, {})), gathers_of(graph, name)
    ahead, back = lowering_of(operator)
    units = (operator.attributes.get("units") or weight.shape[operator.attributes["dim"]],)
    gather = ("all_gather", elements * COMPUTE_BYTES[precision], ahead, units)
    width = (GRADIENT_BYTES if times else COMPUTE_BYTES)[precision]
    reduce = (("reduce_scatter", elements * width, back, units),) if weight.trainable else ()
    if not times:
        return OperatorExchanges((gather,), reduce)
    return OperatorExchanges((gather,), (gather,) * (times - 1), reduce)
