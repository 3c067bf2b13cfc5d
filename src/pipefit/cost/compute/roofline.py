"""The time and the memory of one layer on one device, from a data sheet.

Time of an operator: the kernel time of its FLOPs and bytes (`kernel_time.py`), plus the launch overhead. Bytes moved:
every operator reads its inputs and writes its outputs once; views move nothing. Measured costs (`curves.py`) implement
the same `LayerCosts` interface.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from typing import NamedTuple, Protocol, runtime_checkable

from pipefit.cluster.types import is_processor
from pipefit.cost.compute.layer_query import LayerQuery, MicrobatchShape
from pipefit.cost.compute.operator_times import Times, operator_times, with_merging
from pipefit.cost.compute.symbol_memo import SymbolMemo
from pipefit.cost.static_memory import COMPUTE_BYTES, GRADIENT_BYTES
from pipefit.model.analysis.passing import TransientMemory, transient_bytes
from pipefit.model.analysis.saved import kept_values, kv_gradient_bytes, saved_bytes
from pipefit.model.graph import LOCAL, Graph
from pipefit.model.ops import KINDS
from pipefit.model.ops.attention import EARLIER_SLICES, FIRST_QUERY


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer for one microbatch and slice on one device."""

    forward_s: float
    input_s: float
    "The input-gradient part of the backward pass, including recomputation."
    weight_s: float
    saved_bytes: float
    "Bytes held from F to its B or I."
    pending_bytes: float
    "Bytes held from I to its W."
    passing: TransientMemory | None = None
    "Peak transient memory of the actions; None: transient memory is not counted."
    fused_s: float | None = None
    "Seconds of a fused backward, if measured; None: the sum of both parts."
    kv_gradient_before_bytes: float = 0.0
    "Bytes of gradients for the keys and values of this and earlier slices, held when the backward begins."
    kv_gradient_after_bytes: float = 0.0
    "Bytes of gradients for the keys and values of earlier slices, held when the backward ends."

    @property
    def backward_s(self) -> float:
        """Seconds of a fused backward (B)."""
        return self.input_s + self.weight_s if self.fused_s is None else self.fused_s

    @property
    def least_backward_s(self) -> float:
        """Seconds of the backward, fused or in two parts, whichever is faster."""
        return min(self.input_s + self.weight_s, self.backward_s)


def without_backward(cost: LayerCost) -> LayerCost:
    """Return the cost of a layer without a backward: it holds nothing, and its activations are transient."""
    return LayerCost(cost.forward_s, 0.0, 0.0, 0.0, 0.0, cost.passing)


class LayerSeconds(NamedTuple):
    """The times of a `LayerCost`, without its memory."""

    forward_s: float
    input_s: float
    weight_s: float
    fused_s: float | None = None

    @property
    def least_backward_s(self) -> float:
        """Seconds of the backward, fused or in two parts, whichever is faster."""
        parted = self.input_s + self.weight_s
        return parted if self.fused_s is None else min(parted, self.fused_s)


class LayerCosts(Protocol):
    """A source of layer costs: this file's roofline, or measured curves."""

    notes: tuple[str, ...]

    def layer_cost(self, query: LayerQuery) -> LayerCost:
        """Return the cost of the layer."""
        ...


def layer_seconds(layers: LayerCosts, query: LayerQuery) -> LayerSeconds:
    """Return the times of `LayerCosts.layer_cost`; the memory is not computed if the source allows that."""
    if isinstance(layers, LayerTimeSource):
        return layers.layer_durations(query)
    cost = layers.layer_cost(query)
    return LayerSeconds(cost.forward_s, cost.input_s, cost.weight_s, cost.fused_s)


@runtime_checkable
class LayerTimeSource(Protocol):
    """A source of layer costs that can compute times without memory."""

    def layer_durations(self, query: LayerQuery) -> LayerSeconds:
        """Return the times of the layer, equal to those of its `LayerCost`."""
        ...


class RooflineCosts:
    """Layer costs from device data sheets; results are cached."""

    notes: tuple[str, ...] = (
        "layer times: the device's data-sheet peak and memory bandwidth, times the shares that its kernels reach",
        "passing memory: every operator's inputs, outputs and workspace, as the runtime lets go of them",
    )

    def __init__(self) -> None:
        self._known: dict[object, LayerCost] = {}
        self._memory: dict[object, LayerCost] = {}
        "Memory of layers without times, independent of the device kind and its rings."
        self._operators: dict[object, list[Times]] = {}
        "Times of every operator of a graph for one shape."
        self._times: dict[object, list[SymbolMemo[Times]]] = {}
        "Memos of every operator of a graph for all shapes; attention without the merging of earlier slices."
        self._graphs: dict[int, Graph] = {}

    def layer_cost(self, query: LayerQuery) -> LayerCost:
        """Return the cost of the layer."""
        graph, shape, kind, precision, recompute, _, collective_key = query
        self._graphs[id(graph)] = graph  # kept alive, so that its id stays unique
        key = (id(graph), shape, kind.name, precision, recompute, collective_key)
        if key not in self._known:
            self._known[key] = replace(self._memory_of(query), **self.layer_durations(query)._asdict())
        return self._known[key]

    def _memory_of(self, query: LayerQuery) -> LayerCost:
        """Return the memory of a layer, as a cost without times."""
        precision = query.precision
        widens = is_processor(query.kind) and GRADIENT_BYTES[precision] > COMPUTE_BYTES[precision]
        key = (id(query.graph), query.shape, widens, precision, query.recompute)
        if key not in self._memory:
            self._memory[key] = _layer_memory(query, widens)
        return self._memory[key]

    def layer_durations(self, query: LayerQuery) -> LayerSeconds:
        """Return the times of `layer_cost`."""
        graph, shape, kind, precision, recompute, _, collective_key = query
        self._graphs[id(graph)] = graph
        if shape.rows == 0:
            return LayerSeconds(0.0, 0.0, 0.0)
        key = (id(graph), shape, kind.name, precision, collective_key)
        if key not in self._operators:
            self._operators[key] = self._times_by_operator(query)
        times = self._operators[key]
        sums = (fsum(column) for column in zip(*times, strict=True)) if times else (0.0, 0.0, 0.0)
        forward_s, input_s, weight_s = sums
        again_s = fsum(times[index][0] for index in kept_values(graph, recompute, COMPUTE_BYTES[precision]).again)
        return LayerSeconds(forward_s, input_s + again_s, weight_s)

    def _times_by_operator(self, query: LayerQuery) -> list[Times]:
        """Return the times of every operator, cached across earlier slices where they do not matter."""
        graph, shape, kind, precision, _, collective, collective_key = query
        sizes = None if collective is None else shape._replace(past=0, earlier=None, later=0)  # distinguishes shares
        key = (id(graph), kind.name, precision, collective_key, sizes)
        if key not in self._times:
            self._times[key] = [SymbolMemo() for _ in graph.operators]
        symbols = _shape_symbols(shape)
        results = []
        for operator, kept_times in zip(graph.operators, self._times[key], strict=True):
            work_out = partial(operator_times, graph, operator, kind, precision, collective)
            times = kept_times.get_or_compute(symbols, work_out)
            results.append(with_merging(times, KINDS[operator.kind], shape.earlier_chunks, kind))
        return results


def _shape_symbols(shape: MicrobatchShape) -> dict[str, int]:
    sizes = {"B": shape.rows, "T": shape.tokens, "P": shape.past, "S": shape.own_tokens, "R": shape.own_rows}
    sizes[EARLIER_SLICES] = shape.earlier_chunks
    if shape.own_first is not None:
        sizes[FIRST_QUERY] = shape.own_first
    parts = {
        str(LOCAL[symbol]): -(-count * shape.own_tokens // max(1, shape.tokens))
        for symbol, count in shape.symbols
        if symbol in LOCAL
    }
    return {**sizes, **parts, **dict(shape.symbols)}


def _layer_memory(query: LayerQuery, widens: bool) -> LayerCost:
    """Return a layer's cost without its times."""
    graph, shape, recompute = query.graph, query.shape, query.recompute
    symbols = _shape_symbols(shape)
    width = COMPUTE_BYTES[query.precision]
    if shape.rows == 0:
        return LayerCost(0.0, 0.0, 0.0, 0.0, 0.0)
    saved = saved_bytes(graph, symbols, width, recompute, shape.is_sliced)
    return LayerCost(
        forward_s=0.0,
        input_s=0.0,
        weight_s=0.0,
        saved_bytes=saved.after_forward,
        pending_bytes=saved.after_input_gradient,
        passing=transient_bytes(graph, symbols, width, recompute, widens, shape.is_sliced),
        kv_gradient_before_bytes=kv_gradient_bytes(graph, {**symbols, "T": shape.past + shape.tokens}, width)
        if shape.later
        else 0.0,
        kv_gradient_after_bytes=kv_gradient_bytes(graph, {**symbols, "T": shape.past}, width) if shape.past else 0.0,
    )
