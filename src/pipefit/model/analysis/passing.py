"""The most that one layer has alive while it runs: what it keeps, its inputs and outputs, and what only passes.

The forward and the backward of a graph are gone through operator by operator as the runtime does (`run/stage_compile`,
PyTorch's autograd engine): every storage is counted once, from its allocation until nobody refers to it. Where an
operator allocates something for itself, its kind says how much (`forward_extra`, `backward_extra`).

Rules of the engine that matter: an operator's saved values go as soon as its backward has run; gradients of one value
are added in place where nobody else refers to the first of them, else into a new tensor; sums and views hand the
gradient on as it is. A weight gradient that is put off keeps what the column "W holds" of docs/operators.md says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipefit.model.analysis.regions import Region, arrange
from pipefit.model.analysis.saved import Recompute, analysis_of, call_of, effective_recompute, kept
from pipefit.model.graph import Graph, Operator
from pipefit.model.ops.kind import Call
from pipefit.model.ops.table import KINDS


@dataclass(frozen=True, slots=True)
class Passing:
    """Bytes alive at the worst moment of a layer's actions, of the layer's own storages: what it keeps for the
    backward (or has kept) among them, its input and output too."""

    forward: int
    "F."
    fused: int
    "B, with the output's gradient alive until it has been used."
    input_gradient: int
    "I, with the same."
    fused_last: int
    "B, with the output's gradient alive to the end: the last layer of a stage."
    input_gradient_last: int
    "I, with the same."
    input: int
    "The hidden state that comes in; 0 where a layer starts from tokens."
    output: int
    "The hidden state that goes out, and its gradient; 0 for a loss."
    keeps_input: bool
    "Whether the forward keeps its input for the backward."
    holds_output_gradient: bool
    "Whether a pending W holds the gradient of the output."
    weight: int
    "What W needs beside what it was kept for it."
    tables: int
    "What the layers of a stage share from F until B or I: cos and sin of the positions."


def passing_bytes(
    graph: Graph,
    symbols: Mapping[str, int],
    compute_bytes: int,
    recompute: Recompute,
    widens: bool = False,
    sliced: bool = False,
) -> Passing:
    """The worst moments of one layer for `symbols` B, T (and P, S). `widens`: on a device that makes the factors of
    weight gradients as wide as their buffer first (`OperatorKind.widened_bytes`). `sliced`: see `saved_bytes`."""
    walk = _Walk(graph, symbols, compute_bytes, recompute, widens, sliced)
    hidden = next((tensor.name for tensor in graph.inputs if tensor.role == "activation"), "")
    result = graph.outputs[0]
    loss = not graph.tensor(result).shape
    return Passing(
        forward=walk.forward(),
        fused=walk.backward(deferred=False, lasting=False),
        input_gradient=walk.backward(deferred=True, lasting=False),
        fused_last=walk.backward(deferred=False, lasting=True),
        input_gradient_last=walk.backward(deferred=True, lasting=True),
        input=walk.analysis.value_bytes(hidden, symbols) if hidden else 0,
        output=0 if loss else walk.analysis.value_bytes(result, symbols),
        keeps_input=hidden in walk.kept.values,
        holds_output_gradient=result in walk.analysis.pending_gradients(),
        weight=max((walk.widened(i) + walk.gathered(i, wide=True) for i in range(len(graph.operators))), default=0),
        tables=_table_bytes(graph, symbols, compute_bytes),
    )


def _table_bytes(graph: Graph, symbols: Mapping[str, int], compute_bytes: int) -> int:
    """Cos and sin of every distinct rotary embedding: (B, T, dim/2) each."""
    parts = {
        repr([operator.attributes.get(name) for name in ("theta", "dim", "scaling")]): operator.attributes["dim"]
        for operator in graph.operators
        if operator.kind == "rotary"
    }
    return sum(symbols["B"] * symbols["T"] * (int(dim) // 2) * 2 * compute_bytes for dim in parts.values())


class _Heap:
    """Storages with the number of their holders; the bytes alive and the most that ever were."""

    def __init__(self) -> None:
        self.size: list[int] = []
        self.holders: list[int] = []
        self.live = self.peak = 0

    def new(self, size: int) -> int:
        self.size.append(size)
        self.holders.append(1)
        self.live += size
        self.peak = max(self.peak, self.live)
        return len(self.size) - 1

    def hold(self, storage: int) -> int:
        self.holders[storage] += 1
        return storage

    def drop(self, storage: int) -> None:
        self.holders[storage] -= 1
        if not self.holders[storage]:
            self.live -= self.size[storage]

    def pass_by(self, size: int) -> None:
        self.peak = max(self.peak, self.live + size)


class _Walk:
    """One graph under one choice of recomputation."""

    def __init__(
        self,
        graph: Graph,
        symbols: Mapping[str, int],
        compute_bytes: int,
        recompute: Recompute,
        widens: bool,
        sliced: bool,
    ) -> None:
        self.graph, self.symbols, self.compute_bytes, self.widens = graph, symbols, compute_bytes, widens
        self.analysis = analysis_of(graph, compute_bytes)
        self.choice = effective_recompute(graph, recompute)
        self.kept = kept(graph, recompute, compute_bytes, sliced)
        self.calls: list[Call] = [call_of(graph, operator, symbols, compute_bytes) for operator in graph.operators]
        members = self.kept.again if self.choice == "selective" else ()
        self.items: list[int | Region] = arrange(graph, members) if members else list(range(len(graph.operators)))
        self.inputs = {tensor.name for tensor in graph.inputs if self.analysis.counts(tensor.name)}
        self.needs = {item: self._needs(item) for item in self.items}
        "The kept storages that the backward of each item refers to."
        self.readers = Counter(name for needed in self.needs.values() for name in needed)

    def _needs(self, item: int | Region) -> set[str]:
        if isinstance(item, Region):
            names: Iterable[str] = [name for name in item.inputs if self.analysis.counts(name)]
        else:
            names = self.analysis.saves(self.graph.operators[item])
        return {self.analysis.root[name] for name in names}

    def forward(self) -> int:
        """The peak of F."""
        heap = _Heap()
        saved = (set(self.kept.values), set(self.kept.statistics))
        if self.choice == "full":
            saved = {self.analysis.root[name] for name in self.kept.values}, set()
        self._forward(heap, *saved)
        return heap.peak

    def backward(self, deferred: bool, lasting: bool) -> int:
        """The peak of B, or of I where weight gradients are `deferred`. `lasting`: somebody else holds the output's
        gradient to the end."""
        heap = _Heap()
        gradient = heap.new(self.bytes_of(self.graph.outputs[0]))
        if lasting:
            heap.hold(gradient)
        if self.choice == "full":
            everything = kept(self.graph, "none", self.compute_bytes)
            self._forward(heap, set(everything.values), set(everything.statistics))
            heap = _after(heap, gradient)
            values, statistics = everything.values, everything.statistics
        else:
            values, statistics = self.kept.values, self.kept.statistics
        back = _Backward(self, heap, values, statistics, deferred)
        back.run(gradient)
        return heap.peak

    def bytes_of(self, name: str) -> int:
        return self.analysis.value_bytes(name, self.symbols)

    def own_bytes(self, index: int) -> int:
        return KINDS[self.graph.operators[index].kind].own_bytes(self.calls[index])

    def widened(self, index: int) -> int:
        """What adding an operator's weight gradient allocates."""
        operator = self.graph.operators[index]
        trains = self.widens and self.analysis.trains(operator)
        return KINDS[operator.kind].widened_bytes(self.calls[index]) if trains else 0

    def gathered(self, index: int, wide: bool) -> int:
        """The largest weight that an operator's backward has whole although it is stored split: the weight, or (`wide`)
        its gradient before that is reduced, in float32 or wider."""
        operator = self.graph.operators[index]
        gathers = KINDS[operator.kind].gathers
        unsharded = [
            place
            for place, name in enumerate(operator.inputs)
            if name in self.analysis.producer and not self.analysis.counts(name) and (wide or gathers.get(place) == 2)
        ]
        width = self.calls[index].wide_bytes if wide else self.compute_bytes
        return max(
            (self.bytes_of(operator.inputs[place]) // self.compute_bytes * width for place in unsharded), default=0
        )

    def fresh(self, operator: Operator) -> list[str]:
        """The outputs with a storage of their own."""
        return [name for name in operator.outputs if self.analysis.root[name] == name]

    def _forward(self, heap: _Heap, values: set[str], statistics: set[int]) -> None:
        """Run forward; `values` (roots) and `statistics` stay, and so do inputs and outputs."""
        root = self.analysis.root
        last: dict[str, int] = {}
        for place, item in enumerate(self.items):
            names = [name for index in _operators(item) for name in self._touched(index)]
            last |= {root[name]: place for name in names if name in root}
        stays = values | self.inputs | {root[name] for name in self.graph.outputs}
        storages = {name: heap.new(self.bytes_of(name)) for name in sorted(self.inputs)}
        for place, item in enumerate(self.items):
            for index in _operators(item):
                for name in self.fresh(self.graph.operators[index]):
                    storages[name] = heap.new(self.bytes_of(name))
                if index in statistics:
                    heap.new(self.own_bytes(index))
                heap.pass_by(KINDS[self.graph.operators[index].kind].forward_extra(self.calls[index]))
            for name in [name for name in storages if name not in stays and last[name] <= place]:
                heap.drop(storages.pop(name))

    def _touched(self, index: int) -> Iterable[str]:
        operator = self.graph.operators[index]
        return (name for name in (*operator.inputs, *operator.outputs) if name)


def _after(heap: _Heap, gradient: int) -> _Heap:
    """The heap as the backward of a layer that has just been run again finds it: nothing but the output's gradient,
    which the backward's own count starts from."""
    heap.live = heap.size[gradient]
    return heap


def _operators(item: int | Region) -> Sequence[int]:
    return item.operators if isinstance(item, Region) else (item,)


class _Backward:
    """The backward of one layer."""

    def __init__(
        self, walk: _Walk, heap: _Heap, values: Sequence[str], statistics: Sequence[int], deferred: bool
    ) -> None:
        self.walk, self.heap, self.deferred = walk, heap, deferred
        self.analysis, self.graph = walk.analysis, walk.graph
        self.storages: dict[str, int] = {}
        self.gradients: dict[str, int] = {}
        self.region_of = {index: item for item in walk.items if isinstance(item, Region) for index in item.operators}
        self.computed: dict[int, list[int]] = {}
        "First operator of a region that was run again -> what it holds."
        self.brought: dict[str, int] = {}
        "Values of such regions."
        for name in values:
            self.storages[name] = heap.new(walk.bytes_of(name))
            for _ in range(walk.readers[name] - 1):  # at least one, for what is kept for no gradient
                heap.hold(self.storages[name])
        self.statistics = {index: heap.new(walk.own_bytes(index)) for index in statistics}

    def run(self, gradient: int) -> None:
        self.gradients[self.graph.outputs[0]] = gradient
        for name in self.graph.outputs[1:]:
            self.gradients[name] = self.heap.new(self.walk.bytes_of(name))
        for item in reversed(self.walk.items):
            if isinstance(item, Region):
                self._region(item)
            else:
                for name in self.analysis.saves(self.graph.operators[item]):
                    self._bring_back(name)
                self._operator(item)
            for name in self.walk.needs[item]:
                if name in self.storages:
                    self.heap.drop(self.storages[name])

    def _bring_back(self, name: str) -> None:
        """Run the region again that makes a value which was not kept."""
        index = self.analysis.producer.get(name, -1)
        region = self.region_of.get(index)
        if region is None or region.operators[0] in self.computed or self.analysis.root[name] in self.storages:
            return
        for other in region.inputs:
            if self.analysis.counts(other):
                self._bring_back(other)
        held = self.computed[region.operators[0]] = []
        made: list[int] = []
        for index in region.operators:
            operator = self.graph.operators[index]
            for value in self.walk.fresh(operator):
                self.brought[value] = self.heap.new(self.walk.bytes_of(value))
                made.append(self.brought[value])
            if self.analysis.has_own(index) and not self.analysis.own_stays(index):
                self.statistics[index] = self.heap.new(self.walk.own_bytes(index))
            self.heap.pass_by(KINDS[operator.kind].forward_extra(self.walk.calls[index]))
        for index in region.operators:
            for value in self._saved_inside(index):
                self.heap.hold(self.brought[value])
        held += [self.heap.hold(self.brought[root]) for root in self._outputs(region)]
        for storage in made:
            self.heap.drop(storage)

    def _saved_inside(self, index: int) -> set[str]:
        """The values of its own region, run again, that an operator's backward needs."""
        roots = {self.analysis.root[name] for name in self.analysis.saves(self.graph.operators[index])}
        return roots & set(self.brought)

    def _outputs(self, region: Region) -> set[str]:
        return {self.analysis.root[name] for name in region.outputs} & set(self.brought)

    def _region(self, region: Region) -> None:
        if not any(name in self.gradients for name in region.outputs):
            return
        self._bring_back(region.outputs[0])
        given = [self.heap.hold(self.gradients[name]) for name in region.outputs if name in self.gradients]
        for index in reversed(region.operators):
            self._operator(index)
            for value in self._saved_inside(index):
                self.heap.drop(self.brought[value])
        for storage in (*given, *self.computed.pop(region.operators[0], [])):
            self.heap.drop(storage)

    def _operator(self, index: int) -> None:
        operator, heap = self.graph.operators[index], self.heap
        arrived = [self.gradients.pop(name) for name in operator.outputs if name in self.gradients]
        if not arrived:
            return
        kind, made = KINDS[operator.kind], []
        waits = self.deferred and self.analysis.trains(operator)
        if not waits:
            heap.pass_by(self.walk.widened(index) + self.walk.gathered(index, wide=True))
        for name in dict.fromkeys(operator.inputs):
            if name and self.analysis.counts(name) and self.analysis.needs_gradient(name):
                handed = self.analysis.hands_gradient_on(operator, name)
                made.append((name, heap.hold(arrived[0]) if handed else heap.new(self.walk.bytes_of(name))))
        extra = kind.backward_extra(self.walk.calls[index]) + self.walk.gathered(index, wide=False)
        heap.pass_by(extra + (kind.deferred_extra(self.walk.calls[index]) if waits else 0))
        if waits:
            if kind.pending_gradients:
                heap.hold(arrived[0])
            for place in kind.pending_values:
                root = self.analysis.root[operator.inputs[place]]
                known = self.storages.get(root, self.brought.get(root))
                if known is not None:
                    heap.hold(known)
            heap.new(kind.pending_bytes(self.walk.calls[index]))
        if index in self.statistics:
            heap.drop(self.statistics[index])
        for storage in arrived:
            heap.drop(storage)
        for name, storage in made:
            self._add(name, storage)

    def _add(self, name: str, storage: int) -> None:
        """A gradient joins what has arrived for its value already."""
        heap, first = self.heap, self.gradients.get(name)
        if first is None:
            self.gradients[name] = storage
        elif heap.holders[first] == 1:
            heap.drop(storage)
        else:
            self.gradients[name] = heap.new(heap.size[first])
            heap.drop(first)
            heap.drop(storage)
