"""The start of every task from a task graph and a cost table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipefit.cost.types import Array, CostTable, EdgeCost
from pipefit.errors import ScheduleError
from pipefit.schedule.problem import Edge
from pipefit.schedule.taskgraph.compile import TaskGraph
from pipefit.schedule.taskgraph.kernel import choose_loop, sweep_tasks
from pipefit.schedule.taskgraph.table import GATHER, REDUCE, SEND_B, SEND_F, STEP, B, F, I, W


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """The times of every task of a graph."""

    start_s: Array
    moment_s: Array
    "Two per task: its stop, and the arrival of its transfer (for tasks without one, their start)."
    duration_s: Array
    "For a transfer, the time that it keeps the port busy."

    @property
    def stop_s(self) -> Array:
        """The stop of every task; for a transfer, the time at which the port is free again."""
        return self.moment_s[0::2]

    @property
    def arrival_s(self) -> Array:
        """The time at which a transfer's data can be used."""
        return self.moment_s[1::2]


def reach_times(graph: TaskGraph, times: TaskTimes) -> Array:
    """Return the time at which its lane reaches each row of the table: the end of the lane's previous action."""
    return np.where(graph.before >= 0, times.stop_s[graph.before], 0.0)


def run_graph(graph: TaskGraph, costs: CostTable, compiled: bool | None = None) -> TaskTimes:
    """Return the times of every task under `costs`. Raises ScheduleError if an edge or a kind of action has no cost."""
    duration, transit = task_durations(graph, costs)
    return run_sweep(graph, duration, transit, compiled)


def run_sweep(graph: TaskGraph, duration: Array, transit: Array, compiled: bool | None = None) -> TaskTimes:
    """Return the times of every task from arrays of durations and transit times."""
    function = choose_loop(sweep_tasks, len(graph.after), compiled)
    if function is sweep_tasks:
        start, moment = [0.0] * graph.size, [0.0] * (2 * graph.size)
        sweep_tasks(graph.pointer.tolist(), graph.after.tolist(), duration.tolist(), transit.tolist(), start, moment)
        return TaskTimes(start_s=np.array(start), moment_s=np.array(moment), duration_s=duration)
    starts, moments = np.empty(graph.size), np.empty(2 * graph.size)
    function(graph.pointer, graph.after, duration, transit, starts, moments)
    return TaskTimes(start_s=starts, moment_s=moments, duration_s=duration)


def task_durations(graph: TaskGraph, costs: CostTable) -> tuple[Array, Array]:
    """Return (duration, transit) of every task, in seconds."""
    duration, transit = np.zeros(graph.size), np.zeros(graph.size)
    for code, name in ((F, "F"), (I, "I"), (W, "W"), (B, "B")):
        if code in graph.groups:
            if name not in costs.actions:
                raise ScheduleError("The cost table has no times for an action of the schedule.", seen=name)
            by_stage = costs.actions[name].time_s + costs.overhead_s
            duration[graph.groups[code].tasks] = spread_table(graph, code, by_stage)
    matched = match_edges(graph.table.edges, costs)
    for code, port, transit_field in (
        (SEND_F, "forward_port_s", "forward_s"),
        (SEND_B, "backward_port_s", "backward_s"),
    ):
        if code in graph.groups:
            tasks = graph.groups[code].tasks
            duration[tasks] = spread_table(graph, code, edge_table(matched, port))
            transit[tasks] = spread_table(graph, code, edge_table(matched, transit_field))
    for code, once in ((REDUCE, left_to_reduce_s(graph, costs)), (GATHER, costs.gather_s)):
        rest = np.flatnonzero((graph.kind == code) & graph.plain)
        duration[rest] = once[graph.stage[rest]]
    tied = np.flatnonzero((graph.kind == REDUCE) & ~graph.plain)
    duration[tied] = np.broadcast_to(costs.tied_s, graph.schedule.num_stages)[graph.stage[tied]]
    steps = np.flatnonzero(graph.kind == STEP)
    duration[steps] = costs.step_s[graph.lane[steps]]
    return duration, transit


def left_to_reduce_s(graph: TaskGraph, costs: CostTable) -> Array:
    """Return, per stage, the rest of its gradient reduction after its last backward, a B or a W."""
    if not costs.reduce_hidden_s:
        return costs.reduce_s
    parted = np.zeros(len(costs.reduce_s), dtype=np.bool_)
    parted[graph.stage[graph.kind == W]] = True
    left: Array = costs.reduce_s - np.where(parted, costs.reduce_hidden_s["W"], costs.reduce_hidden_s["B"])
    return left


def spread_table(graph: TaskGraph, code: int, table: Array) -> Array:
    """Return, for the tasks of one kind, their entries in an array over [stage or edge, microbatch, slice], in which an
    axis of length 1 means "the same for all"."""
    schedule = graph.schedule
    first = len(graph.table.edges) if code in (SEND_F, SEND_B) else schedule.num_stages
    dense = np.broadcast_to(table, (first, schedule.microbatches, schedule.slices))
    values: Array = dense.reshape(-1)[graph.groups[code].place]
    return values


def match_edges(edges: Sequence[Edge], costs: CostTable) -> list[EdgeCost]:
    """Return the cost of every edge. Raises ScheduleError that names the edge without one."""
    known = {(cost.source, cost.target, cost.tensor): cost for cost in costs.edges}
    for source, target, tensor in edges:
        if (source, target, tensor) not in known:
            raise ScheduleError(
                "The cost table has no entry for an edge of the schedule.",
                seen=f"stage {source} -> stage {target}" + (f", tensor {tensor!r}" if tensor else ""),
                allowed="one EdgeCost for every edge that crosses lanes",
            )
    return [known[edge] for edge in edges]


def edge_table(matched: Sequence[EdgeCost], field: str) -> Array:
    """Return one field of all edges as an array over [edge, microbatch, slice]; axes of length 1 are kept."""
    return np.stack(np.broadcast_arrays(*(getattr(cost, field) for cost in matched)))
