"""When everything runs: a task graph and a cost table in, the start of every task out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.cost.types import CostTable, EdgeCost
from pipefit.errors import ScheduleError
from pipefit.schedule.compile import ARRIVAL, TaskGraph
from pipefit.schedule.kernel import choose, sweep
from pipefit.schedule.problem import Edge
from pipefit.schedule.table import GATHER, REDUCE, SEND_B, SEND_F, STEP, B, F, Floats, I, Ints, W


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When every task of a graph runs."""

    start_s: Floats
    duration_s: Floats
    "Of a transfer, how long it keeps the port busy."
    transit_s: Floats
    "Of a transfer, from its start to its arrival; else 0."
    lag_s: Floats
    "Beside the graph's `source`: how long after that task's start the waiting task may start."

    @property
    def stop_s(self) -> Floats:
        """When every task is over; of a transfer, when the port is free again."""
        return self.start_s + self.duration_s

    @property
    def arrival_s(self) -> Floats:
        """When a transfer's data can be used."""
        return self.start_s + self.transit_s


def run(graph: TaskGraph, costs: CostTable, compiled: bool | None = None) -> Times:
    """When every task runs under `costs`. Raises ScheduleError if an edge or a kind of action has no cost."""
    duration, transit = durations(graph, costs)
    lag = lags(graph, duration, transit)
    return Times(
        start_s=run_sweep(graph, lag, compiled),
        duration_s=duration,
        transit_s=transit,
        lag_s=lag,
    )


def lags(graph: TaskGraph, duration: Floats, transit: Floats) -> Floats:
    """Beside the graph's `source`: how long after that task's start the waiting task may start."""
    return np.where(graph.wait == ARRIVAL, transit[graph.source], duration[graph.source])


def run_sweep(graph: TaskGraph, lag: Floats, compiled: bool | None = None) -> Floats:
    """The start of every task: the sweep alone, on arrays that are ready."""
    function = choose(sweep, len(graph.source), compiled)
    if function is sweep:
        start = [0.0] * graph.size
        sweep(graph.pointer.tolist(), graph.source.tolist(), lag.tolist(), start)
        return np.array(start, dtype=np.float64)
    out = np.zeros(graph.size)
    function(graph.pointer, graph.source, lag, out)
    return out


def durations(graph: TaskGraph, costs: CostTable) -> tuple[Floats, Floats]:
    """(duration, transit) of every task, in seconds."""
    duration, transit = np.zeros(graph.size), np.zeros(graph.size)
    for code, name in ((F, "F"), (I, "I"), (W, "W"), (B, "B")):
        mask = graph.kind == code
        if not mask.any():
            continue
        if name not in costs.actions:
            raise ScheduleError("The cost table has no times for an action of the schedule.", seen=name)
        duration[mask] = lookup(
            costs.actions[name].time_s, graph.stage[mask], graph.microbatch[mask], graph.slice[mask]
        )
        duration[mask] += costs.overhead_s
    for code, once in ((REDUCE, costs.reduce_s), (GATHER, costs.gather_s)):
        mask = (graph.kind == code) & graph.plain
        duration[mask] = once[graph.stage[mask]]
    mask = graph.kind == STEP
    duration[mask] = costs.step_s[graph.lane[mask]]
    matched = match_edges(graph.table.edges, costs)
    for code, port, whole in ((SEND_F, "forward_port_s", "forward_s"), (SEND_B, "backward_port_s", "backward_s")):
        mask = graph.kind == code
        if mask.any():
            place = (graph.edge[mask], graph.microbatch[mask], graph.slice[mask])
            duration[mask] = lookup(edge_table(matched, port), *place)
            transit[mask] = lookup(edge_table(matched, whole), *place)
    return duration, transit


def match_edges(edges: Sequence[Edge], costs: CostTable) -> list[EdgeCost]:
    """The cost of every edge. Raises ScheduleError that names the edge without one."""
    known = {(cost.source, cost.target, cost.tensor): cost for cost in costs.edges}
    for source, target, tensor in edges:
        if (source, target, tensor) not in known:
            raise ScheduleError(
                "The cost table has no entry for an edge of the schedule.",
                seen=f"stage {source} -> stage {target}" + (f", tensor {tensor!r}" if tensor else ""),
                allowed="one EdgeCost for every edge that crosses lanes",
            )
    return [known[edge] for edge in edges]


def edge_table(matched: Sequence[EdgeCost], field: str) -> Floats:
    """One field of all edges as an array over [edge, microbatch, slice]; axes of length 1 stay so."""
    return np.stack(np.broadcast_arrays(*(getattr(cost, field) for cost in matched)))


def lookup(table: Floats, first: Ints, microbatch: Ints, slice_: Ints) -> Floats:
    """Entries of an array over [stage or edge, microbatch, slice] whose axes of length 1 mean "the same for all"."""
    zero = np.zeros(1, dtype=np.int64)
    place = tuple(
        index if length > 1 else zero for index, length in zip((first, microbatch, slice_), table.shape, strict=True)
    )
    found: Floats = table[place]
    return np.broadcast_to(found, first.shape)
