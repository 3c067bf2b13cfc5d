"""Compilation of a schedule to a task graph: flat arrays of tasks and dependencies, used by lowering and simulation.

Every action but RECV becomes a task; a RECV only determines the earliest start of its transfer. The dependencies:

- a lane does its compute actions, NORM, STEP and FREE one after the other;
- a transfer starts when its SEND is reached, its RECV is posted and the sender's port is free; a port serves the
  transfers of its lane in order, and each keeps it busy for `port_s`;
- the consumer starts when the transfer has arrived, `forward_s` or `backward_s` after the transfer's start;
- REDUCE and GATHER overlap with the compute actions, one after the other on a communication lane of their own;
- NORM waits for everything before it on all lanes that have a NORM; STEP waits for the lane's reductions.

In a computed schedule the transfers are implied: sent right after the producer, with the receive already posted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Ints
from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Schedule
from pipefit.schedule.problem import Edge, chain_edges
from pipefit.schedule.taskgraph.kernel import choose_loop, topological_order
from pipefit.schedule.taskgraph.table import (
    BARRIER,
    GATHER,
    NORM,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    STEP,
    B,
    F,
    I,
    ScheduleTable,
    W,
    schedule_columns,
)

STOP, ARRIVAL = 0, 1
"""The moment that a task waits for: the predecessor's stop, or the arrival of its transfer."""


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """The tasks of one kind, with the index of each in a flattened [stage or edge, microbatch, slice] array."""

    tasks: Ints
    place: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """The tasks of a schedule without times, numbered so that predecessors come first."""

    schedule: Schedule
    table: ScheduleTable
    kind: Ints
    lane: Ints
    "For a transfer, the lane of the sender."
    stage: Ints
    microbatch: Ints
    slice: Ints
    edge: Ints
    plain: NDArray[np.bool_]
    row: Ints
    "The task's action in `table`; for an implied transfer, its producer; -1 for a barrier."
    task: Ints
    "The task of each row of `table`; for a RECV, its transfer."
    before: Ints
    "For each row of `table`, the previous serial task of its lane, or -1."
    consumer: Ints
    "For a transfer, the task that uses its tensor; else -1."
    pointer: Ints
    after: Ints
    "`after[pointer[t]:pointer[t + 1]]` are the moments that task t waits for: 2 p + STOP or 2 p + ARRIVAL."
    groups: Mapping[int, TaskGroup]
    "For each kind with times by stage or edge, its tasks and the index of their costs."

    @property
    def size(self) -> int:
        return len(self.kind)


def compile_graph(
    schedule: Schedule, edges: Sequence[Edge] | None = None, compiled: bool | None = None, own_ports: bool = True
) -> TaskGraph:
    """Return the task graph of a valid schedule. `edges` is needed for computed schedules only; default: the chain.

    Without `own_ports`, the transfers of a lane do not wait for each other; `fluid.share_ports` models the sharing.
    Raises ScheduleError if no order satisfies all dependencies. `compiled` forces numba on or off; both give the same
    graph.
    """
    if edges is None and not schedule.is_lowered:
        edges = chain_edges(schedule.num_stages)
    table = schedule_columns(schedule, () if schedule.is_lowered else edges)
    builder = _GraphBuilder(schedule, table)
    if schedule.is_lowered:
        builder.add_written_transfers(own_ports)
    else:
        builder.add_implied_transfers(own_ports)
    builder.add_lanes()
    builder.add_communication()
    return builder.finish_graph(compiled)


_recent: OrderedDict[tuple[int, tuple[Edge, ...] | None, bool], tuple[Schedule, TaskGraph]] = OrderedDict()


def task_graph(schedule: Schedule, edges: tuple[Edge, ...] | None = None, own_ports: bool = True) -> TaskGraph:
    """`compile_graph` with a cache of the last schedule objects, which searches evaluate under many costs."""
    key = (id(schedule), edges, own_ports)
    if key in _recent:
        _recent.move_to_end(key)
        return _recent[key][1]
    graph = compile_graph(schedule, edges, own_ports=own_ports)
    _recent[key] = (schedule, graph)  # the schedule stays alive, so its id stays its own
    if len(_recent) > 32:
        _recent.popitem(last=False)
    return graph


class _GraphBuilder:
    """Collects tasks and dependencies in table order, then renumbers them so that predecessors come first.

    Task numbers during the collection: a row of the table is its own task (RECV rows stay unused); implied transfers
    and the barrier follow.
    """

    def __init__(self, schedule: Schedule, table: ScheduleTable) -> None:
        self.schedule, self.table = schedule, table
        self.rows = len(table.kind)
        is_recv = (table.kind == RECV_F) | (table.kind == RECV_B)
        is_send = (table.kind == SEND_F) | (table.kind == SEND_B)
        beside = (table.kind == REDUCE) | (table.kind == GATHER)
        self.serial = ~(is_recv | is_send | beside)
        self.before = self._previous_rows(self.serial)
        self.transfer_kind = self.transfer_edge = self.transfer_row = np.zeros(0, dtype=np.int64)
        self.transfer_microbatch = self.transfer_row
        self.waits: list[tuple[Ints, Ints, int]] = []
        self.task = np.arange(self.rows)
        self.consumer_of: tuple[Ints, Ints] = (np.zeros(0, dtype=np.int64),) * 2
        self.barriers = 0

    def add_wait(self, task: Ints, source: Ints, kind: int = STOP) -> None:
        """Let `task` wait for a moment of `source`, if source is not -1."""
        known = source >= 0
        self.waits.append((task[known], source[known], kind))

    def _previous_rows(self, mask: NDArray[np.bool_]) -> Ints:
        """Return, for every row, the last earlier row of its lane that is in `mask`, or -1."""
        marked = np.where(mask, np.arange(self.rows), -1)
        last = np.concatenate(([-1], np.maximum.accumulate(marked)[:-1])) if self.rows else marked
        return np.where(last >= self.table.offset[self.table.lane], last, -1)

    def index_rows(self, *kinds: int, by_edge: bool = False) -> Ints:
        """Return the rows of actions of these kinds by [stage or edge, microbatch, slice], or -1.

        The actions of a unit of several microbatches are entered at each of them.
        """
        table = self.table
        mask = np.isin(table.kind, kinds)
        first = table.edge if by_edge else table.stage
        size = len(table.edges) if by_edge else self.schedule.num_stages
        index = np.full((size, self.schedule.microbatches, self.schedule.slices), -1, dtype=np.int64)
        index[first[mask], table.microbatch[mask], table.slice[mask]] = np.flatnonzero(mask)
        return index if by_edge else by_unit(index, self.schedule)

    def add_written_transfers(self, own_ports: bool) -> None:
        """Add the dependencies of the SEND and RECV actions of a lowered schedule."""
        table = self.table
        ends = np.array([edge[:2] for edge in table.edges], dtype=np.int64).reshape(-1, 2)
        sent, users = [], []
        for send, receive, kinds, end in ((SEND_F, RECV_F, (F,), 1), (SEND_B, RECV_B, (I, B), 0)):
            rows = np.flatnonzero(table.kind == send)
            posted = self.index_rows(receive, by_edge=True)
            use = self.index_rows(*kinds)
            unit = (table.microbatch[rows], table.slice[rows])
            recv = posted[(table.edge[rows], *unit)]
            user = use[(ends[table.edge[rows], end], *unit)]
            if (recv < 0).any() or (user < 0).any():
                raise ScheduleError("A SEND has no RECV or no use; check the schedule to see where.")
            self.add_wait(rows, self.before[rows])
            self.add_wait(rows, self.before[recv])
            self.add_wait(user, rows, ARRIVAL)
            self.task[recv] = rows
            sent.append(rows)
            users.append(user)
        if own_ports:
            is_send = (table.kind == SEND_F) | (table.kind == SEND_B)
            self.add_wait(np.flatnonzero(is_send), self._previous_rows(is_send)[is_send])
        self.consumer_of = (np.concatenate(sent), np.concatenate(users))

    def add_implied_transfers(self, own_ports: bool) -> None:
        """Add a transfer right after every producer whose consumer is on another lane."""
        forward, backward = self.index_rows(F), self.index_rows(I, B)
        rows, kinds, edges, users, places = [], [], [], [], []
        for number, (source, target, _) in enumerate(self.table.edges):
            for code, producers, consumers in (
                (SEND_F, forward[source], forward[target]),
                (SEND_B, backward[target], backward[source]),
            ):
                there = (producers >= 0) & (consumers >= 0)
                rows.append(producers[there])
                users.append(consumers[there])
                places.append(np.nonzero(there)[0])
                kinds.append(np.full(int(there.sum()), code))
                edges.append(np.full(int(there.sum()), number))
        if not rows:
            return
        row, user = np.concatenate(rows), np.concatenate(users)
        order = np.argsort(row, kind="stable")  # rows of a lane are in lane order: so are its transfers
        row, user = row[order], user[order]
        self.transfer_row, self.transfer_kind = row, np.concatenate(kinds)[order]
        self.transfer_edge = np.concatenate(edges)[order]
        self.transfer_microbatch = np.concatenate(places)[order]
        tasks = self.rows + np.arange(len(row))
        self.add_wait(tasks, row)
        self.add_wait(user, tasks, ARRIVAL)
        if own_ports:
            lane = self.table.lane[row]
            same = lane[1:] == lane[:-1]
            self.add_wait(tasks[1:][same], tasks[:-1][same])
        self.consumer_of = (tasks, user)

    def add_lanes(self) -> None:
        """Add the serial order of each lane's compute actions."""
        rows = np.flatnonzero(self.serial)
        self.add_wait(rows, self.before[rows])

    def add_communication(self) -> None:
        """Add REDUCE and GATHER beside the lane, NORM over all lanes, STEP after the reductions."""
        kind = self.table.kind
        beside = (kind == REDUCE) | (kind == GATHER)
        previous = self._previous_rows(beside)
        rows = np.flatnonzero(beside)
        self.add_wait(rows, self.before[rows])
        self.add_wait(rows, previous[rows])
        steps = np.flatnonzero(kind == STEP)
        self.add_wait(steps, previous[steps])
        norms = np.flatnonzero(kind == NORM)
        if len(norms):
            barrier = np.full(len(norms), self.rows + len(self.transfer_row))
            self.barriers = 1
            self.add_wait(barrier, self.before[norms])
            self.add_wait(barrier, previous[norms])
            self.add_wait(norms, barrier)

    def finish_graph(self, compiled: bool | None) -> TaskGraph:
        """Return the graph with its tasks renumbered."""
        table = self.table
        total = self.rows + len(self.transfer_row) + self.barriers
        target = np.concatenate([wait[0] for wait in self.waits])
        after = np.concatenate([2 * wait[1] + wait[2] for wait in self.waits])
        by_target = np.argsort(target, kind="stable")
        pointer = np.searchsorted(target[by_target], np.arange(total + 1))
        after = after[by_target]
        order = _renumber_tasks(pointer, after, compiled)
        if len(order) < total:
            raise ScheduleError(
                "The lanes wait for each other in a circle: no order of the actions satisfies all dependencies.",
                next_step="pipefit.schedule.check.rules draws the first action that can never start",
            )
        used = ~np.isin(table.kind, (RECV_F, RECV_B))
        keep = np.concatenate((used, np.ones(total - self.rows, dtype=np.bool_)))
        order = order[keep[order]]
        number = np.full(total, -1, dtype=np.int64)
        number[order] = np.arange(len(order))
        counts = np.diff(pointer)[order]
        new_pointer = np.concatenate(([0], np.cumsum(counts)))
        after = after[np.repeat(pointer[order] - new_pointer[:-1], counts) + np.arange(new_pointer[-1])]
        none = np.full(self.barriers, -1)
        row = np.concatenate((np.arange(self.rows), self.transfer_row, none))[order]
        kind = np.concatenate((table.kind, self.transfer_kind, none * 0 + BARRIER))[order]
        edge = np.concatenate((table.edge, self.transfer_edge, none))[order]
        consumer = np.full(total, -1, dtype=np.int64)
        consumer[self.consumer_of[0]] = number[self.consumer_of[1]]
        stage, slice_ = (np.where(row >= 0, column[row], -1) for column in (table.stage, table.slice))
        microbatch = np.concatenate((table.microbatch, self.transfer_microbatch, none))[order]
        return TaskGraph(
            schedule=self.schedule,
            table=table,
            kind=kind,
            lane=np.where(row >= 0, table.lane[row], -1),
            stage=stage,
            microbatch=microbatch,
            slice=slice_,
            edge=edge,
            plain=np.where(row >= 0, table.plain[row], True),
            row=row,
            task=number[self.task],
            before=np.where(self.before >= 0, number[self.before], -1),
            consumer=consumer[order],
            pointer=new_pointer,
            after=2 * number[after // 2] + after % 2,
            groups=_task_groups(self.schedule, kind, np.where(edge >= 0, edge, stage), microbatch, slice_),
        )


def by_unit(found: Ints, schedule: Schedule) -> Ints:
    """Copy the entries of an array [stage, microbatch, slice] from the first microbatch of each unit to all of the
    unit."""
    for stage, (_, _, multiple) in enumerate(schedule.turns):
        if multiple > 1:
            found[stage] = np.repeat(found[stage, ::multiple], multiple, axis=0)
    return found


def _task_groups(schedule: Schedule, kind: Ints, first: Ints, microbatch: Ints, slice_: Ints) -> dict[int, TaskGroup]:
    cost_index = (first * schedule.microbatches + microbatch) * schedule.slices + slice_
    groups = {}
    for code in (F, I, W, B, SEND_F, SEND_B):
        tasks = np.flatnonzero(kind == code)
        if len(tasks):
            groups[code] = TaskGroup(tasks, cost_index[tasks])
    return groups


def _renumber_tasks(pointer: Ints, after: Ints, compiled: bool | None) -> Ints:
    tasks = len(pointer) - 1
    function = choose_loop(topological_order, len(after), compiled)
    if function is topological_order:
        order = [0] * tasks
        done = topological_order(pointer.tolist(), after.tolist(), order, [-1] * tasks, [0] * tasks)
        return np.array(order[:done], dtype=np.int64)
    out = np.zeros(tasks, dtype=np.int64)
    done = function(pointer, after, out, np.full(tasks, -1, dtype=np.int64), np.zeros(tasks, dtype=np.int64))
    return out[:done]
