"""Sizes of a layer's storages, and the moments of its actions as sums of such sizes.

The order in which a layer allocates and frees storages does not depend on their sizes. It is therefore walked once for
each graph and recomputation, on symbols (`TracedSizes`). Every moment becomes a row of counts of sizes. The peak for
some numbers of rows and tokens is then the largest product of a row and the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.model.analysis.saved import analyse_graph, operator_call
from pipefit.model.graph import Graph
from pipefit.model.ops.table import KINDS

SizeName = tuple[Any, ...]
"""(method of `GraphSizes`, its arguments)."""


class StorageHeap:
    """Storages with reference counts, the live bytes and their peak."""

    peak: Any

    def __init__(self) -> None:
        self.size: list[Any] = []
        self.holders: list[int] = []
        self.live: Any = 0
        self.peak = 0

    def allocate(self, size: Any) -> int:
        self.size.append(size)
        self.holders.append(1)
        self._change_live(size, 1)
        self._note_moment()
        return len(self.size) - 1

    def add_holder(self, storage: int) -> int:
        self.holders[storage] += 1
        return storage

    def drop_holder(self, storage: int) -> None:
        self.holders[storage] -= 1
        if not self.holders[storage]:
            self._change_live(self.size[storage], -1)

    def touch_peak(self, size: Any) -> None:
        self._change_live(size, 1)
        self._note_moment()
        self._change_live(size, -1)

    def keep_only(self, storage: int) -> None:
        """Start the backward of a layer that was just recomputed. Only this storage is alive then, and the simulation
        of the backward allocates the rest again."""
        self._clear_live()
        self._change_live(self.size[storage], 1)

    def _change_live(self, size: Any, sign: int) -> None:
        self.live += sign * size

    def _note_moment(self) -> None:
        self.peak = max(self.peak, self.live)

    def _clear_live(self) -> None:
        self.live = 0


class TracedHeap(StorageHeap):
    """A heap whose sizes are tuples of indices. Its peak is the set of all moments, each a count of every index."""

    def __init__(self) -> None:
        super().__init__()
        self.live = {}
        self.peak = {}

    def _change_live(self, size: tuple[int, ...], sign: int) -> None:
        for index in size:
            self.live[index] = self.live.get(index, 0) + sign

    def _note_moment(self) -> None:
        self.peak[frozenset((index, count) for index, count in self.live.items() if count)] = None

    def _clear_live(self) -> None:
        self.live = {}


class GraphSizes:
    """The bytes of a graph's values and of the temporaries of its operators, for `symbols` B, T (and P, S)."""

    def __init__(self, graph: Graph, symbols: Mapping[str, int], compute_bytes: int, widens: bool) -> None:
        self.graph, self.symbols, self.compute_bytes, self.widens = graph, symbols, compute_bytes, widens
        self.analysis = analyse_graph(graph, compute_bytes)
        self.calls = [operator_call(graph, operator, symbols, compute_bytes) for operator in graph.operators]

    def make_heap(self) -> StorageHeap:
        return StorageHeap()

    def bytes_of(self, name: str) -> Any:
        return self.analysis.value_bytes(name, self.symbols)

    def operator_bytes(self, function: str, index: int) -> Any:
        """Return the result of a function of `OperatorKind` that counts bytes, such as `forward_extra`."""
        return getattr(KINDS[self.graph.operators[index].kind], function)(self.calls[index])

    def widening_bytes(self, index: int) -> Any:
        """Bytes allocated to add an operator's weight gradient."""
        operator = self.graph.operators[index]
        trains = self.widens and self.analysis.is_trainable(operator)
        return KINDS[operator.kind].widened_bytes(self.calls[index]) if trains else 0

    def gathered_bytes(self, index: int, wide: bool) -> Any:
        """The largest gathered weight in an operator's backward if weights are stored sharded: the weight, or (`wide`)
        its gradient before the reduction, in float32 or wider."""
        operator = self.graph.operators[index]
        kind = KINDS[operator.kind]
        unsharded = [
            position
            for position, name in enumerate(operator.inputs)
            if name in self.analysis.producer
            and not self.analysis.is_activation(name)
            and (wide or kind.count_gathers(operator, position) == 2)
        ]
        width = self.calls[index].wide_bytes if wide else self.compute_bytes
        return max(
            (self.bytes_of(operator.inputs[position]) // self.compute_bytes * width for position in unsharded),
            default=0,
        )


class TracedSizes(GraphSizes):
    """The same with a symbol for each size: a tuple with its index. Symbols are added by joining the tuples."""

    def __init__(self, graph: Graph, symbols: Mapping[str, int], compute_bytes: int, widens: bool) -> None:
        super().__init__(graph, symbols, compute_bytes, widens)
        self.numbers: dict[SizeName, int] = {}

    def make_heap(self) -> StorageHeap:
        return TracedHeap()

    def bytes_of(self, name: str) -> Any:
        return self._number("bytes_of", name)

    def operator_bytes(self, function: str, index: int) -> Any:
        return self._number("operator_bytes", function, index)

    def widening_bytes(self, index: int) -> Any:
        return self._number("widening_bytes", index)

    def gathered_bytes(self, index: int, wide: bool) -> Any:
        return self._number("gathered_bytes", index, wide)

    def _number(self, *name: Any) -> tuple[int]:
        return (self.numbers.setdefault(name, len(self.numbers)),)


@dataclass(frozen=True, slots=True)
class GraphPeaks:
    """The moments of a layer's actions: counts of sizes."""

    names: tuple[SizeName, ...]
    actions: tuple[str, ...]
    starts: tuple[int, ...]
    "First row of each action."
    counts: NDArray[np.int64]
    "[moment, size]."
    keeps_input: bool
    "Whether the forward saves its input for the backward."

    @staticmethod
    def from_rows(
        rows: Mapping[str, Mapping[frozenset[tuple[int, int]], None]], trace: TracedSizes, keeps_input: bool
    ) -> GraphPeaks:
        """Return the peaks with these moments of every action."""
        tables, starts = [], [0]
        for moments in rows.values():
            table = np.zeros((max(1, len(moments)), len(trace.numbers)), dtype=np.int64)
            for row, moment in enumerate(moments):
                for index, count in moment:
                    table[row, index] = count
            tables.append(table)
            starts.append(starts[-1] + len(table))
        return GraphPeaks(tuple(trace.numbers), tuple(rows), tuple(starts[:-1]), np.concatenate(tables), keeps_input)

    def evaluate(self, sizes: GraphSizes) -> Mapping[str, int]:
        """Return the peak of every action for these sizes."""
        values = np.array([getattr(sizes, name)(*arguments) for name, *arguments in self.names], dtype=np.int64)
        peaks: Sequence[int] = np.maximum.reduceat(self.counts @ values, self.starts).tolist()
        return dict(zip(self.actions, peaks, strict=True))
