"""The timeline of one iteration: the times of all actions, idle time, memory and the critical path.

The rules are those of `pipefit.schedule.taskgraph.compile`; this file reads the results. Everything but the start times
is computed on first use, so that a search pays only for the properties that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array, CostTable, Ints
from pipefit.schedule.actions import Action, Kind, Schedule
from pipefit.schedule.problem import Edge
from pipefit.schedule.taskgraph.compile import TaskGraph
from pipefit.schedule.taskgraph.contended import evaluate_schedule
from pipefit.schedule.taskgraph.memory import MemoryCurve, memory_curves
from pipefit.schedule.taskgraph.table import BARRIER, RECV_B, RECV_F, SEND_B, SEND_F, STEP, B
from pipefit.schedule.taskgraph.times import TaskTimes, reach_times
from pipefit.simulate.path import critical_tasks


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One action in time. A transfer spans from its start to the arrival of its data."""

    lane: int
    "For a transfer, the lane of the sender."
    action: Action
    start_s: float
    stop_s: float


def simulate_schedule(
    schedule: Schedule, costs: CostTable, edges: tuple[Edge, ...] | None = None, compiled: bool | None = None
) -> Timeline:
    """Return the timeline of one iteration of a valid schedule, computed or lowered.

    In a computed schedule, transfers are implied along `edges` (default: the edges of `costs`, or the chain if it has
    none); in a lowered one they are the SEND actions. `compiled` forces numba on or off; the result has the same bits.
    Raises ScheduleError if the schedule cannot run to its end or a cost is missing.
    """
    if schedule.is_lowered:
        edges = None
    elif edges is None and costs.edges:
        edges = tuple((edge.source, edge.target, edge.tensor) for edge in costs.edges)
    graph, times = evaluate_schedule(schedule, edges, costs, compiled)
    return Timeline(graph, costs, times)


class Timeline:
    """The simulated timeline of one iteration. Times are in seconds from the start of the first action."""

    def __init__(self, graph: TaskGraph, costs: CostTable, times: TaskTimes) -> None:
        self.graph = graph
        self.costs = costs
        self.times = times

    @property
    def schedule(self) -> Schedule:
        return self.graph.schedule

    @cached_property
    def makespan_s(self) -> float:
        """The time at which the last action has ended and the last transfer has arrived."""
        ends = np.maximum(self.times.stop_s, self.times.arrival_s)
        return float(ends.max()) if len(ends) else 0.0

    @cached_property
    def compute_end_s(self) -> float:
        """The end of the last compute action: the makespan without reductions, norm and step."""
        mask = self.graph.kind <= B
        return float(self.times.stop_s[mask].max()) if mask.any() else 0.0

    @cached_property
    def starts_s(self) -> tuple[Array, ...]:
        """The start of each action, by lane. A RECV starts when it is posted."""
        table, start_s = self.graph.table, self.times.start_s[self.graph.task]
        receive = (table.kind == RECV_F) | (table.kind == RECV_B)
        return self._per_lane(np.where(receive, self._reached_s, start_s))

    @cached_property
    def stops_s(self) -> tuple[Array, ...]:
        """The end of each action, by lane. SEND and RECV end when the data has arrived."""
        stop = np.where(self.graph.consumer >= 0, self.times.arrival_s, self.times.stop_s)
        return self._per_lane(stop[self.graph.task])

    @cached_property
    def busy_s(self) -> Array:
        """The time of each lane in compute actions and the optimizer step."""
        mask = (self.graph.kind <= B) | (self.graph.kind == STEP)
        return self._sum_by_lane(mask, self.times.duration_s)

    @cached_property
    def idle_s(self) -> Array:
        """The rest of the makespan, by lane."""
        return self.makespan_s - self.busy_s

    @cached_property
    def bubble_share(self) -> float:
        """Share of (lanes x time until the last compute action ends) in which nothing is computed.

        For 1F1B and GPipe on d equal stages it is (d - 1)/(m + d - 1).
        """
        computed = self._sum_by_lane(self.graph.kind <= B, self.times.duration_s).sum()
        lane_time = self.compute_end_s * len(self.schedule.lanes)
        return float(1.0 - computed / lane_time) if lane_time else 0.0

    @cached_property
    def port_s(self) -> Array:
        """The time that the port of each lane spends sending."""
        return self._sum_by_lane(self.graph.consumer >= 0, self.times.duration_s)

    @cached_property
    def exposed_transfer_s(self) -> Array:
        """The idle time of each lane caused by communication only: data under way or waiting for a port.

        It counts from the time at which the lane is free and all its inputs have been sent, to their arrival.
        """
        graph, start_s = self.graph, self.times.start_s
        transfers = np.flatnonzero(graph.consumer >= 0)
        ready = np.zeros(graph.size)
        np.maximum.at(ready, graph.consumer[transfers], self._issued_s[transfers])
        users = np.unique(graph.consumer[transfers])
        ready[users] = np.maximum(ready[users], self._reached_s[graph.row[users]])
        return self._sum_by_lane(users, start_s - ready)

    @cached_property
    def lane_memory(self) -> tuple[MemoryCurve, ...]:
        """The memory of each lane over time."""
        return self.memory_under(self.costs)

    def memory_under(self, costs: CostTable) -> tuple[MemoryCurve, ...]:
        """Return the memory curves at the same times with the bytes of another cost table of these stages."""
        return memory_curves(self.graph, costs, self.times)

    @cached_property
    def peak_bytes(self) -> Array:
        """The peak memory of each lane, with static and transient memory."""
        return np.array([curve.peak_bytes for curve in self.lane_memory])

    @cached_property
    def critical_path(self) -> tuple[TimelineSpan, ...]:
        """The chain of actions and transfers, first to last, that determines the makespan.

        Each starts when the one before it ends, the first at 0, and the last ends at the makespan.
        """
        spans = []
        for task, reached in critical_tasks(self.graph, self.times):
            lane = int(self.graph.lane[task])
            spans.append(TimelineSpan(lane, self.task_action(task), float(self.times.start_s[task]), reached))
        return tuple(spans)

    def task_action(self, task: int) -> Action:
        """Return the action of a task; for an implied transfer, the SEND that lowering would insert."""
        graph = self.graph
        kind = int(graph.kind[task])
        if kind == BARRIER:
            return Action("NORM")
        if kind in (SEND_F, SEND_B):
            source, target, tensor = graph.table.edges[int(graph.edge[task])]
            name: Kind = "SEND_F"
            if kind == SEND_B:
                name, source, target = "SEND_B", target, source
            return Action(name, source, int(graph.microbatch[task]), int(graph.slice[task]), target, tensor)
        row = int(graph.row[task])
        lane = int(graph.table.lane[row])
        return self.schedule.lanes[lane][row - int(graph.table.offset[lane])]

    def all_spans(self) -> tuple[TimelineSpan, ...]:
        """Return the spans of all tasks in time order, as traces draw them."""
        order = np.lexsort((np.arange(self.graph.size), self.times.start_s))
        stop = np.where(self.graph.consumer >= 0, self.times.arrival_s, self.times.stop_s)
        return tuple(
            TimelineSpan(
                int(self.graph.lane[task]), self.task_action(task), float(self.times.start_s[task]), float(stop[task])
            )
            for task in order.tolist()
            if self.graph.kind[task] != BARRIER
        )

    @cached_property
    def _reached_s(self) -> Array:
        return reach_times(self.graph, self.times)

    @cached_property
    def _issued_s(self) -> Array:
        """The time at which the SEND of each transfer was reached (lowered) or its producer stopped (computed)."""
        graph = self.graph
        if self.schedule.is_lowered:
            return np.where(graph.row >= 0, self._reached_s[graph.row], 0.0)
        return np.where(graph.row >= 0, self.times.stop_s[graph.task[graph.row]], 0.0)

    def _per_lane(self, values: Array) -> tuple[Array, ...]:
        return tuple(np.split(values, self.graph.table.offset[1:-1]))

    def _sum_by_lane(self, tasks: NDArray[np.bool_] | Ints, values: Array) -> Array:
        total = np.zeros(len(self.schedule.lanes))
        np.add.at(total, self.graph.lane[tasks], values[tasks])
        return total
