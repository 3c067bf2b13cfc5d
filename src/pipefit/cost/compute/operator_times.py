"""Seconds of one operator on one device by the roofline of its data sheet, with the collectives that it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from pipefit.cluster.types import DeviceKind
from pipefit.cost.compute.shard_exchanges import BACKWARD, OperatorExchanges, operator_exchanges
from pipefit.cost.static_memory import COMPUTE_BYTES, Precision
from pipefit.model.analysis.totals import made_from_data, operator_flops, operator_traffic_bytes
from pipefit.model.graph import Graph, Operator, element_count
from pipefit.model.ops import KINDS
from pipefit.model.ops.unshard import stored_weights

MERGING = (5, 4)
"""Kernels that attention runs for each earlier slice beside those for its own keys, forward and backward: over that
slice's keys, and to merge what comes of them (`run/ops/attention.py`)."""

Times = tuple[float, float, float]
"""Seconds of an operator's (forward, input gradient, weight gradient)."""


class CollectiveTime(Protocol):
    """Seconds of collectives over the shard axis in question."""

    def __call__(self, kind: str, total_bytes: float, how: str = "padded", units: tuple[int, ...] = ()) -> float:
        """`total_bytes` of the whole tensor; `how` uneven parts are moved (`cost/comm/lowerings.py`); `units` in which
        the split dimension is cut, of an all_to_all that before and that afterwards; none: any fraction."""


SILENT = "no collectives"
"""The key of layer costs with collectives that are `free_collective`."""


def free_collective(kind: str, total_bytes: float, how: str = "padded", units: tuple[int, ...] = ()) -> float:
    """Collectives that cost nothing."""
    return 0.0


def operator_times(
    graph: Graph,
    operator: Operator,
    kind: DeviceKind,
    precision: Precision,
    collective: CollectiveTime | None,
    symbols: Mapping[str, int],
) -> Times:
    """An operator's time, of attention without what it takes to merge earlier slices."""
    said_s = exchanges_s(operator_exchanges(graph, operator, symbols, precision), collective)
    if operator.kind == "unshard" or operator.kind in BACKWARD:
        return said_s
    rate = kind.peak_flops_per_s[precision] * kind.efficiency
    forward_s, input_s, weight_s = (
        _roofline_s(work, rate, kind) + more_s
        for work, more_s in zip(operator_work(graph, operator, symbols, precision), said_s, strict=True)
    )
    return forward_s, input_s, weight_s


def with_merging(times: Times, chunks: int, kind: DeviceKind) -> Times:
    """The time of attention with what `chunks` earlier slices add to it."""
    more_s, back_s = (count * chunks * kind.overhead_s for count in MERGING)
    return times[0] + more_s, times[1] + back_s, times[2]


def exchanges_s(exchanges: OperatorExchanges, collective: CollectiveTime | None) -> Times:
    """Seconds of the collectives of an operator."""
    if not any(exchanges):
        return 0.0, 0.0, 0.0
    assert collective is not None, "an operator that speaks to others is costed without a shard axis"
    forward_s, input_s, weight_s = (
        sum(collective(kind, size, how, units) if units else collective(kind, size) for kind, size, how, units in each)
        for each in exchanges
    )
    return forward_s, input_s, weight_s


class PassWork(NamedTuple):
    """What one pass of an operator computes and moves."""

    flops: float
    moved_bytes: float


def operator_work(
    graph: Graph, operator: Operator, symbols: Mapping[str, int], precision: Precision
) -> tuple[PassWork | None, PassWork | None, PassWork | None]:
    """Forward, input gradient and weight gradient of an operator; None for a pass that it does not have."""
    if KINDS[operator.kind].view:
        return None, None, None
    width = COMPUTE_BYTES[precision]
    flops = operator_flops(graph, operator, symbols)
    traffic = operator_traffic_bytes(graph, operator, symbols, width)
    outputs = sum(element_count(graph.find_tensor(name).shape, symbols) * width for name in operator.outputs)
    parameters = _parameter_elements(graph, operator.inputs)
    # The gradient pass of a product reads and writes as much as its forward; of anything else, its output's gradient
    # comes on top. A weight gradient is added into a buffer: read and written once each.
    back = traffic if flops.input_gradient else traffic + outputs
    forward = PassWork(flops.forward, traffic)
    input_ = PassWork(flops.input_gradient, back) if _has_input_gradient(graph, operator) else None
    if not parameters:
        return forward, input_, None
    gradient = 2 * parameters * max(4, width)
    weight = PassWork(flops.weight_gradient, (traffic if flops.weight_gradient else 0) + gradient)
    return forward, input_, weight


def _roofline_s(work: PassWork | None, rate: float, kind: DeviceKind) -> float:
    if work is None:
        return 0.0
    return max(work.flops / rate, work.moved_bytes / kind.memory_bandwidth_bytes_per_s) + kind.overhead_s


def _has_input_gradient(graph: Graph, operator: Operator) -> bool:
    """Whether a gradient flows to an activation input: not for what only reads tokens or positions, or is made of data
    alone."""
    if made_from_data(graph, operator):
        return False
    roles = {tensor.name: tensor.role for tensor in graph.inputs}
    parameters = stored_weights(graph)
    return any(
        name and name not in parameters and roles.get(name, "activation") == "activation" for name in operator.inputs
    )


def _parameter_elements(graph: Graph, names: Sequence[str]) -> int:
    found = stored_weights(graph)
    return sum(element_count(found[name].shape, {}) for name in {*names} & {*found} if found[name].trainable)
