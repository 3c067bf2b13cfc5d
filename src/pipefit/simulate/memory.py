"""The memory of every lane over time: what is held, what passes, and the receive buffers.

An action that holds more afterwards takes that memory when it starts; one that frees does so when it ends; what it
needs beside that (`peak_bytes`) lives from its start to its end. A receive buffer lives from the moment its receive
is posted until the action that uses it is over. Under all of it lie the lane's static bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipefit.cost.types import CostTable
from pipefit.schedule.compile import TaskGraph
from pipefit.schedule.table import CODE, RECV_B, RECV_F, SEND_B, SEND_F, B, Floats, Ints
from pipefit.schedule.times import Times, edge_table, match_edges, spread


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The memory of one lane: a step function."""

    time_s: Floats
    bytes: Floats
    "In use from the time beside it until the next one; events at one time stand in the order they happen."
    static_bytes: float
    peak_bytes: float
    "The largest of `bytes`, and of the static bytes before anything runs."
    peak_s: float
    "When it is first reached."
    buffers_bytes: float
    "The largest sum of receive buffers alone."


def memory_curves(graph: TaskGraph, costs: CostTable, times: Times, posted_s: Floats) -> tuple[MemoryCurve, ...]:
    """One curve per lane."""
    events = _Events()
    compute = np.flatnonzero(graph.kind <= B)
    held, passing = (each[compute] for each in _held_and_passing(graph, costs))
    rows = graph.row[compute]
    events.add(graph.lane[compute], times.start_s[compute], 4 * rows, np.maximum(held, 0.0) + passing)
    events.add(graph.lane[compute], times.stop_s[compute], 4 * rows + 3, np.minimum(held, 0.0) - passing)
    transfers = np.flatnonzero(graph.consumer >= 0)
    if len(transfers):
        size = _buffer_bytes(graph, costs)[transfers]
        user = graph.consumer[transfers]
        events.add(graph.lane[user], posted_s[transfers], _posted_place(graph)[transfers], size, buffer=True)
        events.add(graph.lane[user], times.stop_s[user], 4 * graph.row[user] + 3, -size, buffer=True)
    return events.curves(costs.static_bytes, len(graph.schedule.lanes))


def _held_and_passing(graph: TaskGraph, costs: CostTable) -> tuple[Floats, Floats]:
    """For every task, the bytes it leaves allocated, and the bytes it needs beside them while it runs."""
    held, passing = np.zeros(graph.size), np.zeros(graph.size)
    for name in ("F", "I", "W", "B"):
        code = CODE[name]
        if code in graph.groups:
            tasks, table = graph.groups[code].tasks, costs.actions[name]
            held[tasks] = spread(graph, code, table.held_bytes)
            passing[tasks] = spread(graph, code, table.peak_bytes)
    return held, passing


def _buffer_bytes(graph: TaskGraph, costs: CostTable) -> Floats:
    """For every task, the bytes of the receive buffer of what it transfers."""
    size = np.zeros(graph.size)
    matched = match_edges(graph.table.edges, costs)
    for code, field in ((SEND_F, "forward_bytes"), (SEND_B, "backward_bytes")):
        if code in graph.groups:
            size[graph.groups[code].tasks] = spread(graph, code, edge_table(matched, field))
    return size


def _posted_place(graph: TaskGraph) -> Ints:
    """For every transfer, the place of its posting among the events of one time: at its RECV, or before its user."""
    place = 4 * graph.row[graph.consumer] - 1
    receives = np.flatnonzero((graph.table.kind == RECV_F) | (graph.table.kind == RECV_B))
    place[graph.task[receives]] = 4 * receives
    return place


class _Events:
    """Changes of memory, collected in any order; each has a lane, a time, and a place among events of that time."""

    def __init__(self) -> None:
        self.parts: list[tuple[Ints, Floats, Ints, Floats, Floats]] = []

    def add(self, lane: Ints, time_s: Floats, place: Ints, change: Floats, buffer: bool = False) -> None:
        self.parts.append((lane, time_s, place, change, change if buffer else np.zeros(len(change))))

    def curves(self, static_bytes: Floats, lanes: int) -> tuple[MemoryCurve, ...]:
        lane, time_s, place, change, buffer = (np.concatenate(column) for column in zip(*self.parts, strict=True))
        order = np.lexsort((place, time_s, lane))
        bounds = np.searchsorted(lane[order], np.arange(lanes + 1))
        result = []
        for i in range(lanes):
            own = order[bounds[i] : bounds[i + 1]]
            static = float(static_bytes[i])
            level = static + np.cumsum(change[own])
            top = int(level.argmax()) if len(level) else 0
            peak = float(level[top]) if len(level) else static
            buffers = np.cumsum(buffer[own])
            result.append(
                MemoryCurve(
                    time_s=time_s[own],
                    bytes=level,
                    static_bytes=static,
                    peak_bytes=max(static, peak),
                    peak_s=float(time_s[own][top]) if len(level) and peak > static else 0.0,
                    buffers_bytes=float(buffers.max()) if len(level) else 0.0,
                )
            )
        return tuple(result)
