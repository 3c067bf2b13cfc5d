"""Peak memory of one layer during its actions: saved tensors, inputs, outputs and temporaries.

The forward and the backward of a graph are simulated operator by operator in the order of the runtime
(`run/stage/compile.py`, PyTorch's autograd engine). Every storage counts once, from its allocation until its last
reference is dropped. Temporaries inside an operator come from its kind (`forward_extra`, `backward_extra`).

Rules of the engine: an operator's saved values are freed as soon as its backward has run. Gradients of one value are
added in place if nothing else refers to the first of them, otherwise into a new tensor. Sums and views pass the
gradient on without a copy. A deferred weight gradient keeps the tensors in column "W holds" of
docs/reference/operators.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipefit.model.analysis.peaks import GraphPeaks, GraphSizes, StorageHeap, TracedSizes
from pipefit.model.analysis.regions import OperatorRegion, arrange_regions
from pipefit.model.analysis.saved import Recompute, effective_recompute, kept_values
from pipefit.model.graph import Graph, Operator
from pipefit.model.ops.table import KINDS


@dataclass(frozen=True, slots=True)
class TransientMemory:
    """Peak bytes of a layer's actions, counting only the layer's own storages. Tensors saved for the backward, the
    input and the output are included."""

    forward: int
    "F."
    fused: int
    "B, with the output's gradient alive until its last use."
    input_gradient: int
    "I, with the output's gradient alive until its last use."
    fused_last: int
    "B, with the output's gradient alive to the end: the last layer of a stage."
    input_gradient_last: int
    "I, with the output's gradient alive to the end."
    input: int
    "The hidden state of the input; 0 if a layer starts from tokens."
    output: int
    "The hidden state of the output, and equally its gradient; 0 for a loss."
    keeps_input: bool
    "Whether the forward saves its input for the backward."
    holds_output_gradient: bool
    "Whether a deferred weight gradient (W) holds the gradient of the output."
    weight: int
    "Transient bytes of W beside the tensors that were kept for it."
    tables: int
    "Tensors that the layers of a stage share from F until B or I: cos and sin of the positions."


def transient_bytes(
    graph: Graph,
    symbols: Mapping[str, int],
    compute_bytes: int,
    recompute: Recompute,
    widens: bool = False,
    sliced: bool = False,
) -> TransientMemory:
    """Return the peaks of one layer for `symbols` B, T (and P, S). `widens`: the device first converts the factors of
    weight gradients to the dtype of their buffer (`OperatorKind.widened_bytes`). `sliced`: see `saved_bytes`."""
    sizes = GraphSizes(graph, symbols, compute_bytes, widens)
    known, key = sizes.analysis.peaks, (recompute, widens, sliced)
    if key not in known:
        known[key] = _trace_peaks(graph, symbols, compute_bytes, key)
    peaks: GraphPeaks = known[key]
    hidden = graph.hidden_input
    result = graph.outputs[0]
    loss = not graph.find_tensor(result).shape
    bytes_of_action = peaks.evaluate(sizes)
    return TransientMemory(
        **bytes_of_action,
        input=sizes.bytes_of(hidden) if hidden else 0,
        output=0 if loss else sizes.bytes_of(result),
        keeps_input=peaks.keeps_input,
        holds_output_gradient=result in sizes.analysis.pending_gradients(),
        tables=_table_bytes(graph, symbols, compute_bytes),
    )


def _trace_peaks(
    graph: Graph, symbols: Mapping[str, int], compute_bytes: int, key: tuple[Recompute, bool, bool]
) -> GraphPeaks:
    """Return the moments of a layer's actions, which are the same for all sizes."""
    recompute, widens, sliced = key
    trace = TracedSizes(graph, symbols, compute_bytes, widens)
    walk = _GraphWalk(trace, recompute, sliced)
    rows = {
        "forward": walk.forward_peak(),
        "fused": walk.backward_peak(deferred=False, lasting=False),
        "input_gradient": walk.backward_peak(deferred=True, lasting=False),
        "fused_last": walk.backward_peak(deferred=False, lasting=True),
        "input_gradient_last": walk.backward_peak(deferred=True, lasting=True),
    }
    weight = trace.make_heap()
    for index in range(len(graph.operators)):
        weight.touch_peak(trace.widening_bytes(index) + trace.gathered_bytes(index, True))
    rows["weight"] = weight.peak
    return GraphPeaks.from_rows(rows, trace, keeps_input=graph.hidden_input in walk.kept.values)


def _table_bytes(graph: Graph, symbols: Mapping[str, int], compute_bytes: int) -> int:
    """Bytes of the distinct tables of positions, such as cos and sin of a rotary embedding."""
    tables = dict(
        table(operator.attributes) for operator in graph.operators if (table := KINDS[operator.kind].position_table)
    )
    return sum(symbols["B"] * symbols["T"] * features * compute_bytes for features in tables.values())


class _GraphWalk:
    """One graph under one choice of recomputation. It runs on bytes, or on symbols of bytes (`TracedSizes`)."""

    def __init__(self, sizes: GraphSizes, recompute: Recompute, sliced: bool) -> None:
        self.sizes, self.graph, self.compute_bytes = sizes, sizes.graph, sizes.compute_bytes
        self.analysis, graph, compute_bytes = sizes.analysis, sizes.graph, sizes.compute_bytes
        self.choice = effective_recompute(graph, recompute)
        self.kept = kept_values(graph, recompute, compute_bytes, sliced)
        members = self.kept.again if self.choice == "selective" else ()
        self.items: list[int | OperatorRegion] = (
            arrange_regions(graph, members) if members else list(range(len(graph.operators)))
        )
        self.inputs = {tensor.name for tensor in graph.inputs if self.analysis.is_activation(tensor.name)}
        self.needs = {item: self._needed_storages(item) for item in self.items}
        "The kept storages that the backward of each item refers to."
        self.readers = Counter(name for needed in self.needs.values() for name in needed)

    def _needed_storages(self, item: int | OperatorRegion) -> set[str]:
        if isinstance(item, OperatorRegion):
            names: Iterable[str] = [name for name in item.inputs if self.analysis.is_activation(name)]
        else:
            names = self.analysis.saved_values(self.graph.operators[item])
        return {self.analysis.root[name] for name in names}

    def forward_peak(self) -> Any:
        """The peak of F."""
        heap = self.sizes.make_heap()
        saved = (set(self.kept.values), set(self.kept.statistics))
        if self.choice == "full":
            saved = {self.analysis.root[name] for name in self.kept.values}, set()
        self._run_forward(heap, *saved)
        return heap.peak

    def backward_peak(self, deferred: bool, lasting: bool) -> Any:
        """The peak of B, or of I if weight gradients are `deferred`. `lasting`: the caller holds the output's gradient
        to the end."""
        heap = self.sizes.make_heap()
        gradient = heap.allocate(self.sizes.bytes_of(self.graph.outputs[0]))
        if lasting:
            heap.add_holder(gradient)
        if self.choice == "full":
            everything = kept_values(self.graph, "none", self.compute_bytes)
            self._run_forward(heap, set(everything.values), set(everything.statistics))
            heap.keep_only(gradient)
            values, statistics = everything.values, everything.statistics
        else:
            values, statistics = self.kept.values, self.kept.statistics
        back = _BackwardWalk(self, heap, values, statistics, deferred)
        back.run_backward(gradient)
        return heap.peak

    def fresh_outputs(self, operator: Operator) -> list[str]:
        """The outputs with a storage of their own."""
        return [name for name in operator.outputs if self.analysis.root[name] == name]

    def _run_forward(self, heap: StorageHeap, values: set[str], statistics: set[int]) -> None:
        """Simulate the forward. `values` (roots), `statistics`, inputs and outputs stay alive."""
        root = self.analysis.root
        last: dict[str, int] = {}
        for position, item in enumerate(self.items):
            names = [name for index in _item_operators(item) for name in self._touched_values(index)]
            last |= {root[name]: position for name in names if name in root}
        stays = values | self.inputs | {root[name] for name in self.graph.outputs}
        storages = {name: heap.allocate(self.sizes.bytes_of(name)) for name in sorted(self.inputs)}
        for position, item in enumerate(self.items):
            for index in _item_operators(item):
                for name in self.fresh_outputs(self.graph.operators[index]):
                    storages[name] = heap.allocate(self.sizes.bytes_of(name))
                if index in statistics:
                    heap.allocate(self.sizes.operator_bytes("own_bytes", index))
                heap.touch_peak(self.sizes.operator_bytes("forward_extra", index))
            for name in [name for name in storages if name not in stays and last[name] <= position]:
                heap.drop_holder(storages.pop(name))

    def _touched_values(self, index: int) -> Iterable[str]:
        operator = self.graph.operators[index]
        return (name for name in (*operator.inputs, *operator.outputs) if name)


def _item_operators(item: int | OperatorRegion) -> Sequence[int]:
    return item.operators if isinstance(item, OperatorRegion) else (item,)


class _BackwardWalk:
    """The backward of one layer."""

    def __init__(
        self, walk: _GraphWalk, heap: StorageHeap, values: Sequence[str], statistics: Sequence[int], deferred: bool
    ) -> None:
        self.walk, self.heap, self.deferred = walk, heap, deferred
        self.analysis, self.graph = walk.analysis, walk.graph
        self.storages: dict[str, int] = {}
        self.gradients: dict[str, int] = {}
        self.region_of = {
            index: item for item in walk.items if isinstance(item, OperatorRegion) for index in item.operators
        }
        self.computed: dict[int, list[int]] = {}
        "First operator of a rerun region -> the storages that it holds."
        self.brought: dict[str, int] = {}
        "Value computed by a rerun region -> its storage."
        for name in values:
            self.storages[name] = heap.allocate(walk.sizes.bytes_of(name))
            for _ in range(walk.readers[name] - 1):  # at least one, for values kept without a gradient
                heap.add_holder(self.storages[name])
        self.statistics = {index: heap.allocate(walk.sizes.operator_bytes("own_bytes", index)) for index in statistics}

    def run_backward(self, gradient: int) -> None:
        self.gradients[self.graph.outputs[0]] = gradient
        for name in self.graph.outputs[1:]:
            self.gradients[name] = self.heap.allocate(self.walk.sizes.bytes_of(name))
        for item in reversed(self.walk.items):
            if isinstance(item, OperatorRegion):
                self._run_region(item)
            else:
                for name in self.analysis.saved_values(self.graph.operators[item]):
                    self._rerun_region(name)
                self._run_operator(item)
            for name in self.walk.needs[item]:
                if name in self.storages:
                    self.heap.drop_holder(self.storages[name])

    def _rerun_region(self, name: str) -> None:
        """Rerun the region that computes a value which was not saved."""
        index = self.analysis.producer.get(name, -1)
        region = self.region_of.get(index)
        if region is None or region.operators[0] in self.computed or self.analysis.root[name] in self.storages:
            return
        for input_name in region.inputs:
            if self.analysis.is_activation(input_name):
                self._rerun_region(input_name)
        held = self.computed[region.operators[0]] = []
        storages: list[int] = []
        for index in region.operators:
            operator = self.graph.operators[index]
            for value in self.walk.fresh_outputs(operator):
                self.brought[value] = self.heap.allocate(self.walk.sizes.bytes_of(value))
                storages.append(self.brought[value])
            if self.analysis.has_own_bytes(index) and not self.analysis.keeps_own_bytes(index):
                self.statistics[index] = self.heap.allocate(self.walk.sizes.operator_bytes("own_bytes", index))
            self.heap.touch_peak(self.walk.sizes.operator_bytes("forward_extra", index))
        for index in region.operators:
            for value in self._saved_inside(index):
                self.heap.add_holder(self.brought[value])
        held += [self.heap.add_holder(self.brought[root]) for root in self._brought_outputs(region)]
        for storage in storages:
            self.heap.drop_holder(storage)

    def _saved_inside(self, index: int) -> set[str]:
        """Values of the operator's own rerun region that its backward needs."""
        roots = {self.analysis.root[name] for name in self.analysis.saved_values(self.graph.operators[index])}
        return roots & set(self.brought)

    def _brought_outputs(self, region: OperatorRegion) -> set[str]:
        return {self.analysis.root[name] for name in region.outputs} & set(self.brought)

    def _run_region(self, region: OperatorRegion) -> None:
        if not any(name in self.gradients for name in region.outputs):
            return
        self._rerun_region(region.outputs[0])
        output_gradients = [
            self.heap.add_holder(self.gradients[name]) for name in region.outputs if name in self.gradients
        ]
        for index in reversed(region.operators):
            self._run_operator(index)
            for value in self._saved_inside(index):
                self.heap.drop_holder(self.brought[value])
        for storage in (*output_gradients, *self.computed.pop(region.operators[0], [])):
            self.heap.drop_holder(storage)

    def _run_operator(self, index: int) -> None:
        operator, heap, sizes = self.graph.operators[index], self.heap, self.walk.sizes
        arrived = [self.gradients.pop(name) for name in operator.outputs if name in self.gradients]
        if not arrived:
            return
        kind, input_gradients = KINDS[operator.kind], []
        waits = self.deferred and self.analysis.is_trainable(operator)
        if not waits:
            heap.touch_peak(sizes.widening_bytes(index) + sizes.gathered_bytes(index, True))
        for name in dict.fromkeys(operator.inputs):
            if name and self.analysis.is_activation(name) and self.analysis.needs_gradient(name):
                handed = self.analysis.shares_gradient(operator, name)
                input_gradients.append(
                    (name, heap.add_holder(arrived[0]) if handed else heap.allocate(sizes.bytes_of(name)))
                )
        extra = sizes.operator_bytes("backward_extra", index) + sizes.gathered_bytes(index, False)
        heap.touch_peak(extra + sizes.operator_bytes("deferred_extra", index) if waits else extra)
        if waits:
            if kind.pending_gradients:
                heap.add_holder(arrived[0])
            for position in kind.pending_values:
                root = self.analysis.root[operator.inputs[position]]
                known = self.storages.get(root, self.brought.get(root))
                if known is not None:
                    heap.add_holder(known)
            heap.allocate(sizes.operator_bytes("pending_bytes", index))
        if index in self.statistics:
            heap.drop_holder(self.statistics[index])
        for storage in arrived:
            heap.drop_holder(storage)
        for name, storage in input_gradients:
            self._add_gradient(name, storage)

    def _add_gradient(self, name: str, storage: int) -> None:
        """Add a gradient to the gradient that its value has so far."""
        heap, first = self.heap, self.gradients.get(name)
        if first is None:
            self.gradients[name] = storage
        elif heap.holders[first] == 1:
            heap.drop_holder(storage)
        else:
            self.gradients[name] = heap.allocate(heap.size[first])
            heap.drop_holder(first)
            heap.drop_holder(storage)
