"""What the devices of a shard axis send each other for one operator, pass by pass: the collectives between operators,
those that gather a parameter stored split and reduce its gradient, and those inside operators.

Layer times are priced by it (`cost/compute/roofline.py`), and the report counts its bytes on the links
(`show/traffic.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES, Precision
from pipefit.model.analysis.saved import operator_call
from pipefit.model.graph import Graph, Operator, element_count, size_value
from pipefit.model.ops import KINDS
from pipefit.model.ops.exchange import lowering_of
from pipefit.model.ops.kind import Said
from pipefit.model.ops.reshare import KIND as RESHARE
from pipefit.model.ops.reshare import shares_of
from pipefit.model.ops.unshard import gathers_of, stored_weights

BACKWARD = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}
"""What a collective of the forward pass does in the backward pass; `shard_slice` moves nothing between devices."""


class OperatorExchanges(NamedTuple):
    """The collectives of one operator by pass, each (kind, bytes of the whole tensor, lowering, units)."""

    forward: tuple[Said, ...] = ()
    input_gradient: tuple[Said, ...] = ()
    weight_gradient: tuple[Said, ...] = ()


NOTHING = OperatorExchanges()


def operator_exchanges(
    graph: Graph, operator: Operator, symbols: Mapping[str, int], precision: Precision
) -> OperatorExchanges:
    """The collectives of an operator, for these sizes."""
    if operator.kind == "unshard":
        return _unshard_exchanges(graph, operator, precision)
    if operator.kind == RESHARE:
        return _reshare_exchange(graph, operator, symbols, precision)
    if operator.kind in BACKWARD:
        return _between_operators(graph, operator, symbols, precision)
    talks = KINDS[operator.kind].talks
    if talks is None:
        return NOTHING
    talk = talks(operator_call(graph, operator, symbols, COMPUTE_BYTES[precision]))
    return OperatorExchanges(talk.forward, talk.input_gradient, talk.weight_gradient)


def _between_operators(
    graph: Graph, operator: Operator, symbols: Mapping[str, int], precision: Precision
) -> OperatorExchanges:
    """A collective between operators, and the one of its backward."""
    elements, units = _moved_elements(graph, operator, symbols)
    whole = float(elements * COMPUTE_BYTES[precision])
    ahead, back = lowering_of(operator)
    return OperatorExchanges(
        forward=((operator.kind, whole, ahead, units),),
        input_gradient=((BACKWARD[operator.kind], whole, back, units[::-1]),),
    )


def _reshare_exchange(
    graph: Graph, operator: Operator, symbols: Mapping[str, int], precision: Precision
) -> OperatorExchanges:
    """What is cut by some shares is cut by others; the units of a `Said` are the shares here, before and after."""
    (old, new), at = shares_of(operator), operator.attributes
    shape = graph.find_tensor(operator.outputs[0]).shape
    whole = (*shape[: at["dim"]], at["whole"], *shape[at["dim"] + 1 :])
    size = float(element_count(whole, symbols) * COMPUTE_BYTES[precision])
    there, back = ((RESHARE, size, "alltoallv", each) for each in ((*old, *new), (*new, *old)))
    return OperatorExchanges(forward=(there,), input_gradient=(back,))


def _moved_elements(graph: Graph, operator: Operator, symbols: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
    """The elements of the whole tensor, and the units in which it is cut (of an all_to_all, before and afterwards; of
    an all_reduce, none)."""
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
    """A parameter that is stored split: gathered in the forward and, where the input gradient needs it, again; its
    gradient reduced in every microbatch, with the weight's. Where autograd keeps it, it is gathered once, and its
    gradient reduced as it comes."""
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
