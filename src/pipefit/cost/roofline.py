"""The time and the memory of one layer on one device, from a data sheet.

Time of an operator: the larger of FLOPs / (peak x efficiency) and bytes moved / memory bandwidth, plus the overhead
of issuing it (roofline: Williams, Waterman and Patterson 2009). Bytes moved: every operator reads its inputs and
writes its outputs once, views move nothing (no fusion is assumed, so pointwise chains are costed on the slow side).
The measured cost model of a later version takes this one's place behind the same `LayerCosts` interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from pipefit.cluster.types import DeviceKind, is_processor
from pipefit.cost.exchanges import BACKWARD, Exchanges, exchanges_of
from pipefit.cost.memory import COMPUTE_BYTES, GRADIENT_BYTES, Precision
from pipefit.model.graph import Graph, Operator, element_count
from pipefit.model.ops import KINDS, saved_bytes
from pipefit.model.ops.passing import Passing, passing_bytes
from pipefit.model.ops.saved import kept, owed_bytes
from pipefit.model.ops.totals import operator_flops, operator_traffic_bytes
from pipefit.model.ops.unshard import weights

Recompute = Literal["none", "selective", "full"]


class Place(NamedTuple):
    """The sizes of one microbatch and slice on one device."""

    rows: int
    "Symbol B."
    tokens: int
    "Symbol T: of the slice."
    past: int
    "Symbol P: tokens of earlier slices that are attended to."
    own_tokens: int
    "Symbol S: this device's part of the tokens where a shard program splits them."
    earlier: int | None = None
    "Slices that the past came in; None: as many as it has slices of this length."
    own_rows: int = 0
    "Symbol R: this device's part of the rows where a shard program splits them."
    later: int = 0
    "Tokens of later slices."

    @property
    def sliced(self) -> bool:
        """Whether the microbatch comes in several slices, of which this is one."""
        return self.past + self.later > 0

    @property
    def chunks(self) -> int:
        """Earlier slices that attention goes through one by one."""
        if not self.past:
            return 0
        return max(1, round(self.past / max(1, self.tokens)) if self.earlier is None else self.earlier)


MERGING = (5, 4)
"""Kernels that attention runs for each earlier slice beside those for its own keys, forward and backward: over that
slice's keys, and to merge what comes of them (`run/ops/attention.py`)."""


class CollectiveTime(Protocol):
    """Seconds of collectives over the shard axis in question."""

    def __call__(self, kind: str, total_bytes: float, how: str = "padded", units: tuple[int, ...] = ()) -> float:
        """`total_bytes` of the whole tensor; `how` uneven parts are moved (`cost/lowerings.py`); `units` in which the
        split dimension is cut, of an all_to_all that before and that afterwards; none: any fraction."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Of one layer, microbatch and slice on one device."""

    forward_s: float
    input_s: float
    "The input-gradient part of the backward pass, recomputation included."
    weight_s: float
    saved_bytes: float
    "Alive from F to its B or I."
    pending_bytes: float
    "Alive from I to its W."
    passing: Passing | None = None
    "The worst moments of its actions; None: what only passes is not counted."
    fused_s: float | None = None
    "A fused backward, where it was measured by itself; None: it takes the time of both parts."
    owed_before: float = 0.0
    "What slices owe to keys and values (of this slice and earlier ones) when its backward begins."
    owed_behind: float = 0.0
    "The same when its backward ends: to earlier ones."

    @property
    def backward_s(self) -> float:
        """A fused backward (B)."""
        return self.input_s + self.weight_s if self.fused_s is None else self.fused_s

    @property
    def least_backward_s(self) -> float:
        """The backward, fused or in two parts, whichever is faster."""
        return min(self.input_s + self.weight_s, self.backward_s)


class LayerSeconds(NamedTuple):
    """The times of a `LayerCost`, without its memory."""

    forward_s: float
    input_s: float
    weight_s: float
    fused_s: float | None = None

    @property
    def least_backward_s(self) -> float:
        """The backward, fused or in two parts, whichever is faster."""
        parted = self.input_s + self.weight_s
        return parted if self.fused_s is None else min(parted, self.fused_s)


class LayerCosts(Protocol):
    """Where layer costs come from: this file's roofline, or measured curves."""

    notes: tuple[str, ...]

    def layer(
        self,
        graph: Graph,
        place: Place,
        kind: DeviceKind,
        precision: Precision,
        recompute: Recompute,
        collective: CollectiveTime | None = None,
        collective_key: object = None,
    ) -> LayerCost:
        """The cost of `graph` for these sizes."""
        ...


def layer_seconds(
    layers: LayerCosts,
    graph: Graph,
    place: Place,
    kind: DeviceKind,
    precision: Precision,
    recompute: Recompute,
    collective: CollectiveTime | None = None,
    collective_key: object = None,
) -> LayerSeconds:
    """The times of `LayerCosts.layer`, without working out its memory where the source of costs can do without."""
    if isinstance(layers, SecondsAlone):
        return layers.seconds(graph, place, kind, precision, recompute, collective, collective_key)
    cost = layers.layer(graph, place, kind, precision, recompute, collective, collective_key)
    return LayerSeconds(cost.forward_s, cost.input_s, cost.weight_s, cost.fused_s)


@runtime_checkable
class SecondsAlone(Protocol):
    """Layer costs that know times without memory."""

    def seconds(
        self,
        graph: Graph,
        place: Place,
        kind: DeviceKind,
        precision: Precision,
        recompute: Recompute,
        collective: CollectiveTime | None = None,
        collective_key: object = None,
    ) -> LayerSeconds:
        """The times of `graph` for these sizes: the same as those of its `LayerCost`."""
        ...


class Roofline:
    """Layer costs from device data sheets; equal questions are answered from memory."""

    notes: tuple[str, ...] = (
        "layer times: roofline of the device's data-sheet peak x efficiency and memory bandwidth, no operator fusion",
        "passing memory: every operator's inputs, outputs and workspace, as the runtime lets go of them",
    )

    def __init__(self) -> None:
        self._known: dict[object, LayerCost] = {}
        self._operators: dict[object, list[tuple[float, float, float]]] = {}
        "(forward, input gradient, weight gradient) of every operator."
        self._graphs: dict[int, Graph] = {}

    def layer(
        self,
        graph: Graph,
        place: Place,
        kind: DeviceKind,
        precision: Precision,
        recompute: Recompute,
        collective: CollectiveTime | None = None,
        collective_key: object = None,
    ) -> LayerCost:
        """The cost of `graph`. `collective` is needed where the graph holds collectives; `collective_key` names it."""
        self._graphs[id(graph)] = graph  # kept alive, so that its id stays its own
        key = (id(graph), place, kind.name, precision, recompute, collective_key)
        if key not in self._known:
            times = self.seconds(graph, place, kind, precision, recompute, collective, collective_key)
            widens = is_processor(kind) and GRADIENT_BYTES[precision] > COMPUTE_BYTES[precision]
            self._known[key] = _layer(graph, place, times, precision, recompute, widens)
        return self._known[key]

    def seconds(
        self,
        graph: Graph,
        place: Place,
        kind: DeviceKind,
        precision: Precision,
        recompute: Recompute,
        collective: CollectiveTime | None = None,
        collective_key: object = None,
    ) -> LayerSeconds:
        """The times of `layer` alone; arguments as there."""
        self._graphs[id(graph)] = graph
        if place.rows == 0:
            return LayerSeconds(0.0, 0.0, 0.0)
        key = (id(graph), place, kind.name, precision, collective_key)
        if key not in self._operators:
            symbols = _symbols(place)
            self._operators[key] = [
                _operator(graph, operator, symbols, kind, precision, collective, place.chunks)
                for operator in graph.operators
            ]
        times = self._operators[key]
        sums = (sum(column) for column in zip(*times, strict=True)) if times else (0.0, 0.0, 0.0)
        forward_s, input_s, weight_s = sums
        again_s = sum(times[index][0] for index in kept(graph, recompute, COMPUTE_BYTES[precision]).again)
        return LayerSeconds(forward_s, input_s + again_s, weight_s)


def _symbols(place: Place) -> dict[str, int]:
    return {"B": place.rows, "T": place.tokens, "P": place.past, "S": place.own_tokens, "R": place.own_rows}


def _layer(
    graph: Graph, place: Place, times: LayerSeconds, precision: Precision, recompute: Recompute, widens: bool
) -> LayerCost:
    symbols = _symbols(place)
    width = COMPUTE_BYTES[precision]
    if place.rows == 0:
        return LayerCost(0.0, 0.0, 0.0, 0.0, 0.0)
    saved = saved_bytes(graph, symbols, width, recompute, place.sliced)
    return LayerCost(
        forward_s=times.forward_s,
        input_s=times.input_s,
        weight_s=times.weight_s,
        saved_bytes=saved.after_forward,
        pending_bytes=saved.after_input_gradient,
        passing=passing_bytes(graph, symbols, width, recompute, widens, place.sliced),
        owed_before=owed_bytes(graph, {**symbols, "T": place.past + place.tokens}, width) if place.later else 0.0,
        owed_behind=owed_bytes(graph, {**symbols, "T": place.past}, width) if place.past else 0.0,
    )


def _operator(
    graph: Graph,
    operator: Operator,
    symbols: dict[str, int],
    kind: DeviceKind,
    precision: Precision,
    collective: CollectiveTime | None,
    chunks: int,
) -> tuple[float, float, float]:
    """Seconds of (forward, input gradient, weight gradient)."""
    said_s = exchanges_s(exchanges_of(graph, operator, symbols, precision), collective)
    if operator.kind == "unshard" or operator.kind in BACKWARD:
        return said_s
    rate = kind.peak_flops_per_s[precision] * kind.efficiency
    forward_s, input_s, weight_s = (
        _roof(work, rate, kind) + more_s
        for work, more_s in zip(operator_work(graph, operator, symbols, precision), said_s, strict=True)
    )
    if operator.kind == "attention":
        more_s, back_s = (count * chunks * kind.overhead_s for count in MERGING)
        return forward_s + more_s, input_s + back_s, weight_s
    return forward_s, input_s, weight_s


def exchanges_s(exchanges: Exchanges, collective: CollectiveTime | None) -> tuple[float, float, float]:
    """Seconds of the collectives of an operator: forward, input gradient and weight gradient."""
    if not any(exchanges):
        return 0.0, 0.0, 0.0
    assert collective is not None, "an operator that speaks to others is costed without a shard axis"
    forward_s, input_s, weight_s = (
        sum(collective(kind, size, how, units) if units else collective(kind, size) for kind, size, how, units in each)
        for each in exchanges
    )
    return forward_s, input_s, weight_s


class Work(NamedTuple):
    """What one pass of an operator computes and moves."""

    flops: float
    moved_bytes: float


def operator_work(
    graph: Graph, operator: Operator, symbols: Mapping[str, int], precision: Precision
) -> tuple[Work | None, Work | None, Work | None]:
    """Forward, input gradient and weight gradient of an operator; None for a pass that it does not have."""
    if KINDS[operator.kind].view:
        return None, None, None
    width = COMPUTE_BYTES[precision]
    flops = operator_flops(graph, operator, symbols)
    traffic = operator_traffic_bytes(graph, operator, symbols, width)
    outputs = sum(element_count(graph.tensor(name).shape, symbols) * width for name in operator.outputs)
    parameters = _parameter_elements(graph, operator.inputs)
    # The gradient pass of a product reads and writes as much as its forward; of anything else, its output's gradient
    # comes on top. A weight gradient is added into a buffer: read and written once each.
    back = traffic if flops.input_gradient else traffic + outputs
    forward = Work(flops.forward, traffic)
    input_ = Work(flops.input_gradient, back) if _differentiable(graph, operator) else None
    if not parameters:
        return forward, input_, None
    gradient = 2 * parameters * max(4, width)
    weight = Work(flops.weight_gradient, (traffic if flops.weight_gradient else 0) + gradient)
    return forward, input_, weight


def _roof(work: Work | None, rate: float, kind: DeviceKind) -> float:
    if work is None:
        return 0.0
    return max(work.flops / rate, work.moved_bytes / kind.memory_bandwidth_bytes_per_s) + kind.overhead_s


def _differentiable(graph: Graph, operator: Operator) -> bool:
    """Whether a gradient flows to an activation input: not for what only reads tokens or positions."""
    roles = {tensor.name: tensor.role for tensor in graph.inputs}
    parameters = weights(graph)
    return any(
        name and name not in parameters and roles.get(name, "activation") == "activation" for name in operator.inputs
    )


def _parameter_elements(graph: Graph, names: Sequence[str]) -> int:
    found = weights(graph)
    return sum(element_count(found[name].shape, {}) for name in {*names} & {*found} if found[name].trainable)
