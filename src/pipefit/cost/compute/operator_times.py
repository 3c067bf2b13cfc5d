"""The time of one operator on one device by the data-sheet roofline, including the collectives that it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Protocol

from pipefit.cluster.types import DeviceKind
from pipefit.cost.compute.kernel_time import PassWork, kernel_time
from pipefit.cost.compute.shard_exchanges import BACKWARD_COLLECTIVE, OperatorExchanges, operator_exchanges
from pipefit.cost.static_memory import COMPUTE_BYTES
from pipefit.model.analysis.narrow_products import QUANTIZED_BYTES, has_narrow_product
from pipefit.model.analysis.saved import operator_call
from pipefit.model.analysis.totals import executed_flops, made_from_data, operator_traffic_bytes
from pipefit.model.graph import Graph, Operator, element_count
from pipefit.model.ops import KINDS, OperatorKind
from pipefit.model.ops.unshard import stored_weights
from pipefit.precision import NARROW, Precision

Times = tuple[float, float, float]
"""Seconds of an operator's forward, input gradient and weight gradient."""


class CollectiveTime(Protocol):
    """A function that returns the seconds of collectives over one shard axis."""

    def __call__(self, kind: str, total_bytes: float, how: str = "padded", units: tuple[int, ...] = ()) -> float:
        """Return the seconds of collective `kind` on a tensor with `total_bytes` in all.

        `how`: the lowering of uneven parts (`cost/comm/lowerings.py`). `units`: the number of units of the split
        dimension (of an all_to_all: of the source and the target dimension); empty: any fraction is allowed.
        """


SILENT = "no collectives"
"""The cache key of layer costs computed with `free_collective`."""


def free_collective(kind: str, total_bytes: float, how: str = "padded", units: tuple[int, ...] = ()) -> float:
    """Return 0 seconds: collectives that cost nothing."""
    return 0.0


def operator_times(
    graph: Graph,
    operator: Operator,
    kind: DeviceKind,
    precision: Precision,
    collective: CollectiveTime | None,
    symbols: Mapping[str, int],
) -> Times:
    """Return an operator's times; attention without the merging of earlier slices."""
    said_s = exchanges_s(operator_exchanges(graph, operator, symbols, precision), collective)
    if operator.kind == "unshard" or operator.kind in BACKWARD_COLLECTIVE:
        return said_s
    works = operator_work(graph, operator, symbols, precision)
    known = KINDS[operator.kind]
    counts = (1, 1, 1)
    if known.kernels is not None:
        counts = (*known.kernels(operator_call(graph, operator, symbols, COMPUTE_BYTES[precision])), 1)
    forward_s, input_s, weight_s = (
        (0.0 if work is None else kernel_time(work, known, kind, precision).seconds + count * kind.overhead_s) + more_s
        for work, count, more_s in zip(works, counts, said_s, strict=True)
    )
    return forward_s, input_s, weight_s


def with_merging(times: Times, operator: OperatorKind, chunks: int, kind: DeviceKind) -> Times:
    """Return the times of an operator with the merging of `chunks` earlier slices."""
    if operator.merging_kernels == (0, 0):
        return times
    more_s, back_s = (count * chunks * kind.overhead_s for count in operator.merging_kernels)
    return times[0] + more_s, times[1] + back_s, times[2]


def exchanges_s(exchanges: OperatorExchanges, collective: CollectiveTime | None) -> Times:
    """Return the seconds of an operator's collectives, per pass."""
    if not any(exchanges):
        return 0.0, 0.0, 0.0
    assert collective is not None, "an operator that speaks to others is costed without a shard axis"
    forward_s, input_s, weight_s = (
        fsum(
            collective(kind, size, how, units) if units else collective(kind, size)
            for kind, size, how, units in pass_exchanges
        )
        for pass_exchanges in exchanges
    )
    return forward_s, input_s, weight_s


def operator_work(
    graph: Graph, operator: Operator, symbols: Mapping[str, int], precision: Precision, narrow: bool | None = None
) -> tuple[PassWork | None, PassWork | None, PassWork | None]:
    """Return the work of an operator's forward, input gradient and weight gradient; None for a missing pass.

    `narrow`: whether a product runs in FP8 under such a precision; None: as the graph of a whole layer tells.
    """
    if KINDS[operator.kind].view:
        return None, None, None
    width = COMPUTE_BYTES[precision]
    flops = executed_flops(graph, operator, symbols)
    traffic = operator_traffic_bytes(graph, operator, symbols, width)
    outputs = sum(element_count(graph.find_tensor(name).shape, symbols) * width for name in operator.outputs)
    parameters = _parameter_elements(graph, operator.inputs)
    # The input gradient of a product reads and writes as much as its forward; for other operators, the gradient of
    # the output comes on top. A weight gradient is added into a buffer: one read and one write.
    back = traffic if flops.input_gradient else traffic + outputs
    stored = parameters * width
    casts = (0.0, 0.0, 0.0)
    if precision in NARROW and (has_narrow_product(graph, operator) if narrow is None else narrow):
        casts = _quantized_bytes(graph, operator, symbols)
    inner = KINDS[operator.kind].kernel_traffic
    inside, inside_back = inner(operator_call(graph, operator, symbols, width)) if inner else (0, 0)
    forward = PassWork(flops.forward, traffic + inside, stored, casts[0])
    input_ = (
        PassWork(flops.input_gradient, back + inside_back, stored, casts[1])
        if _has_input_gradient(graph, operator)
        else None
    )
    if not parameters:
        return forward, input_, None
    gradient = 2 * parameters * max(4, width)
    if not flops.weight_gradient:
        return forward, input_, PassWork(0, gradient, gradient)
    return forward, input_, PassWork(flops.weight_gradient, traffic + gradient, stored + gradient, casts[2])


def _quantized_bytes(graph: Graph, operator: Operator, symbols: Mapping[str, int]) -> Times:
    """Return the bytes that turn the factors of each pass of a linear layer into FP8."""
    rows = element_count(graph.find_tensor(operator.inputs[0]).shape, symbols)
    outputs = element_count(graph.find_tensor(operator.outputs[0]).shape, symbols)
    weights = element_count(stored_weights(graph)[operator.inputs[1]].shape, {})
    pairs = ((rows, weights), (outputs, weights), (outputs, rows))
    forward, input_, weight = (float(QUANTIZED_BYTES * (left + right)) for left, right in pairs)
    return forward, input_, weight


def _has_input_gradient(graph: Graph, operator: Operator) -> bool:
    """Return whether a gradient flows to an activation input.

    False for operators that only read tokens or positions, and for values made from data alone.
    """
    if made_from_data(graph, operator):
        return False
    roles = {tensor.name: tensor.role for tensor in graph.inputs}
    parameters = stored_weights(graph)
    return any(
        name and name not in parameters and roles.get(name, "activation") == "activation" for name in operator.inputs
    )


def _parameter_elements(graph: Graph, names: Sequence[str]) -> int:
    weights = stored_weights(graph)
    return sum(element_count(weights[name].shape, {}) for name in {*names} & {*weights} if weights[name].trainable)
