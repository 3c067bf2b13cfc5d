"""The memory of every lane over time: what is held, what passes, and what is on its way.

An action that holds more afterwards takes that memory when it starts; one that frees does so when it ends; what it
needs beside that (`peak_bytes`, its inputs and outputs among it) lives from its start to its end. A receive buffer is
alive from the moment its receive is posted until the action that uses it starts. What a slice's backward leaves for
the keys and values of earlier slices is alive until the next one's starts. What an action hands on is alive from
its end until the next stage on the same lane starts with it, or until it has been sent: in a lowered schedule until as
many later messages of its channel have been sent as the receiver has receives open at once
(`schedule/lowering/messages.py`), in a computed one until the transfer is over. Under all of it lie the lane's static
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipefit.cost.types import CostTable
from pipefit.schedule.taskgraph.compile import TaskGraph, by_unit
from pipefit.schedule.taskgraph.table import CODE, RECV_B, RECV_F, SEND_B, SEND_F, B, F, Floats, I, Ints, W
from pipefit.schedule.taskgraph.times import TaskTimes, edge_table, match_edges, spread_table


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
    left_bytes: float
    "What is still kept of what was sent when the lane has nothing more to compute: until its last action is over."
    parts_bytes: Mapping[str, float]
    "What the peak is made of beside the static bytes: `saved` (held between actions), `passing`, `messages`."


def memory_curves(
    graph: TaskGraph, costs: CostTable, times: TaskTimes, posted_s: Floats, reached_s: Floats
) -> tuple[MemoryCurve, ...]:
    """One curve per lane. `posted_s`: of each transfer, when its receive is posted; `reached_s`: of each action, when
    its lane gets there."""
    events = _MemoryEvents()
    compute = np.flatnonzero(graph.kind <= B)
    held, passing = (each[compute] for each in _task_bytes(graph, costs))
    lane, place = graph.lane[compute], PLACES * graph.row[compute]
    events.add_change(lane, times.start_s[compute], place + START, np.maximum(held, 0.0) + passing, passing=passing)
    events.add_change(lane, times.stop_s[compute], place + STOP, np.minimum(held, 0.0) - passing, passing=-passing)
    transfers = np.flatnonzero(graph.consumer >= 0)
    if len(transfers):
        size, user = _edge_bytes(graph, costs, "bytes")[transfers], graph.consumer[transfers]
        events.add_change(graph.lane[user], posted_s[transfers], _posting_order(graph)[transfers], size, RECEIVED)
        events.add_change(graph.lane[user], times.start_s[user], PLACES * graph.row[user] + TAKE, -size, RECEIVED)
        _add_sent(events, graph, costs, times, reached_s)
    _add_handed_on(events, graph, costs, times)
    _add_kv_gradients(events, graph, costs, times)
    _add_reductions(events, graph, costs, times)
    return events.lane_curves(costs.static_bytes, len(graph.schedule.lanes), PLACES * len(graph.table.kind))


PLACES = 8
TAKE, START, STOP, GIVE = 1, 2, 6, 7
"""The order of the events of one action at one time: it takes its inputs over, starts, stops, hands on."""

REDUCING = 3.5
"""Hidden states that the last backward of a stage has alive when its reduction begins: of its first layer the input,
the output where that is made again, and its gradient; and the tables of the positions."""

COMPUTE, RECEIVED, SENT = range(3)
"""What an event is about: what actions hold and need, receive buffers, what is handed on until it has left."""


def _add_sent(events: _MemoryEvents, graph: TaskGraph, costs: CostTable, times: TaskTimes, reached_s: Floats) -> None:
    """What senders keep."""
    transfers = np.flatnonzero(graph.consumer >= 0)
    size = _edge_bytes(graph, costs, "sent_bytes")[transfers]
    if not size.any():
        return
    if graph.schedule.is_lowered:
        maker = _producing_tasks(graph, transfers)
        left = _releasing_sends(graph, transfers)
        known = left >= 0
        last_s = np.zeros(len(graph.schedule.lanes))
        own = graph.lane >= 0
        np.maximum.at(last_s, graph.lane[own], np.maximum(times.stop_s, times.arrival_s)[own])
        gone_s = np.where(known, reached_s[left], last_s[graph.lane[transfers]])
        gone = np.where(known, PLACES * left + STOP, PLACES * len(graph.table.kind))
    else:
        maker = graph.task[graph.row[transfers]]
        gone_s, gone = times.arrival_s[transfers], PLACES * graph.row[transfers] + GIVE
    lane = graph.lane[transfers]
    events.add_change(lane, times.stop_s[maker], PLACES * graph.row[maker] + GIVE, size, SENT)
    events.add_change(lane, np.maximum(gone_s, times.stop_s[maker]), gone, -size, SENT)


def _producing_tasks(graph: TaskGraph, transfers: Ints) -> Ints:
    """The task that makes what each transfer of a lowered schedule carries: of its own stage, microbatch and slice."""
    forward, backward = _task_index(graph, (F,)), _task_index(graph, (I, B))
    place = graph.stage[transfers], graph.microbatch[transfers], graph.slice[transfers]
    maker: Ints = np.where(graph.kind[transfers] == SEND_F, forward[place], backward[place])
    return maker


def _releasing_sends(graph: TaskGraph, transfers: Ints) -> Ints:
    """The row of the SEND with which the tensor of each SEND is let go; -1: the end of the lane."""
    channel = 2 * graph.edge[transfers] + (graph.kind[transfers] == SEND_B)
    count, channels = len(transfers), int(channel.max()) + 1
    receive = np.zeros(graph.size, dtype=np.int64)
    rows = np.flatnonzero((graph.table.kind == RECV_F) | (graph.table.kind == RECV_B))
    receive[graph.task[rows]] = rows
    place = np.concatenate((receive[transfers], graph.row[graph.consumer[transfers]]))
    change = np.repeat([1, -1], count)
    both = np.concatenate((channel, channel))
    order = np.lexsort((place, both))
    now = np.cumsum(change[order])  # every channel ends at zero
    window = np.zeros(channels, dtype=np.int64)
    np.maximum.at(window, both[order], now)
    by_row = np.lexsort((graph.row[transfers], channel))
    later = np.arange(count) + window[channel[by_row]]
    inside = later < count
    same = inside & (channel[by_row][np.where(inside, later, 0)] == channel[by_row])
    result = np.full(count, -1, dtype=np.int64)
    result[by_row] = np.where(same, graph.row[transfers][by_row][np.where(same, later, 0)], -1)
    return result


def _add_handed_on(events: _MemoryEvents, graph: TaskGraph, costs: CostTable, times: TaskTimes) -> None:
    """What one stage hands to another on its own lane: from the end of the one's action to the start of the other's."""
    placement = graph.schedule.placement
    local = [edge for edge in costs.edges if placement[edge.source] == placement[edge.target]]
    if not local:
        return
    forward, backward = _task_index(graph, (F,)), _task_index(graph, (I, B))
    for edge in local:
        for made, used, table in (
            (forward[edge.source], forward[edge.target], edge.forward_sent_bytes),
            (backward[edge.target], backward[edge.source], edge.backward_sent_bytes),
        ):
            there = (made >= 0) & (used >= 0)
            size, made, used = np.broadcast_to(table, made.shape)[there], made[there], used[there]
            events.add_change(graph.lane[made], times.stop_s[made], PLACES * graph.row[made] + GIVE, size, SENT)
            events.add_change(graph.lane[used], times.start_s[used], PLACES * graph.row[used] + TAKE, -size, SENT)


def _add_kv_gradients(events: _MemoryEvents, graph: TaskGraph, costs: CostTable, times: TaskTimes) -> None:
    """What a backward leaves for the keys and values of earlier slices, until the next one of its microbatch starts."""
    if not costs.owed_bytes.any():
        return
    backward = _task_index(graph, (I, B))
    there = (backward[:, :, 1:] >= 0) & (backward[:, :, :-1] >= 0)
    size = np.broadcast_to(costs.owed_bytes, backward.shape)[:, :, 1:][there]
    made, used = backward[:, :, 1:][there], backward[:, :, :-1][there]
    events.add_change(graph.lane[made], times.stop_s[made], PLACES * graph.row[made] + GIVE, size)
    events.add_change(graph.lane[used], times.start_s[used], PLACES * graph.row[used] + TAKE, -size)


def _add_reductions(events: _MemoryEvents, graph: TaskGraph, costs: CostTable, times: TaskTimes) -> None:
    """What the reduction of a stage holds from its last backward until the end; when it begins, that backward has not
    let go of its last tensors yet."""
    for stage in np.flatnonzero(np.broadcast_to(costs.reduce_copy_bytes, graph.schedule.num_stages)):
        own = np.flatnonzero((graph.stage == stage) & ((graph.kind == B) | (graph.kind == W)))
        last = own[[int(graph.row[own].argmax())]]
        size = np.broadcast_to(costs.reduce_copy_bytes, graph.schedule.num_stages)[stage]
        near = [edge for edge in costs.edges if stage in (edge.source, edge.target)]
        ends = [edge.forward_bytes if edge.target == stage else edge.forward_sent_bytes for edge in near]
        hidden = max((float(each.max()) for each in ends), default=0.0)
        for change in (size, REDUCING * hidden, -REDUCING * hidden):
            events.add_change(
                graph.lane[last], times.stop_s[last], PLACES * graph.row[last] + GIVE, np.full(1, change), SENT
            )


def _task_index(graph: TaskGraph, kinds: tuple[int, ...]) -> Ints:
    """Tasks by [stage, microbatch, slice] of actions of these kinds."""
    schedule = graph.schedule
    tasks = np.flatnonzero(np.isin(graph.kind, kinds))
    found = np.full((schedule.num_stages, schedule.microbatches, schedule.slices), -1, dtype=np.int64)
    found[graph.stage[tasks], graph.microbatch[tasks], graph.slice[tasks]] = tasks
    return by_unit(found, schedule)


def _task_bytes(graph: TaskGraph, costs: CostTable) -> tuple[Floats, Floats]:
    """For every task, the bytes it leaves allocated, and the bytes it needs beside them while it runs."""
    held, passing = np.zeros(graph.size), np.zeros(graph.size)
    for name in ("F", "I", "W", "B"):
        code = CODE[name]
        if code in graph.groups:
            tasks, table = graph.groups[code].tasks, costs.actions[name]
            held[tasks] = spread_table(graph, code, table.held_bytes)
            passing[tasks] = spread_table(graph, code, table.peak_bytes)
    return held, passing


def _edge_bytes(graph: TaskGraph, costs: CostTable, field: str) -> Floats:
    """For every task, `bytes` (the receive buffer) or `sent_bytes` of what it transfers."""
    size = np.zeros(graph.size)
    matched = match_edges(graph.table.edges, costs)
    for code, way in ((SEND_F, "forward"), (SEND_B, "backward")):
        if code in graph.groups:
            size[graph.groups[code].tasks] = spread_table(graph, code, edge_table(matched, f"{way}_{field}"))
    return size


def _posting_order(graph: TaskGraph) -> Ints:
    """For every transfer, the place of its posting among the events of one time: at its RECV, or before its user."""
    place = PLACES * graph.row[graph.consumer] - 1
    receives = np.flatnonzero((graph.table.kind == RECV_F) | (graph.table.kind == RECV_B))
    place[graph.task[receives]] = PLACES * receives + START
    return place


class _MemoryEvents:
    """Changes of memory, collected in any order; each has a lane, a time, a place among events of that time."""

    def __init__(self) -> None:
        self.columns: list[tuple[Ints, Floats, Ints, Floats, Ints, Floats]] = []

    def add_change(
        self,
        lane: Ints,
        time_s: Floats,
        place: Ints,
        change: Floats,
        about: int = COMPUTE,
        passing: Floats | None = None,
    ) -> None:
        """`passing` is the part of the change that is over with the action."""
        none = np.zeros(len(change)) if passing is None else passing
        self.columns.append((lane, time_s, place, change, np.full(len(change), about), none))

    def lane_curves(self, static_bytes: Floats, lanes: int, end: int) -> tuple[MemoryCurve, ...]:
        """`end`: the place of what happens at the end of a lane."""
        lane, time_s, place, change, about, passing = (
            np.concatenate(column) for column in zip(*self.columns, strict=True)
        )
        order = np.lexsort((place, time_s, lane))
        bounds = np.searchsorted(lane[order], np.arange(lanes + 1))
        result = []
        for i in range(lanes):
            own = order[bounds[i] : bounds[i + 1]]
            static = float(static_bytes[i])
            level = static + np.cumsum(change[own])
            top = int(level.argmax()) if len(level) else 0
            peak = float(level[top]) if len(level) else static
            buffers = np.cumsum(np.where(about[own] == RECEIVED, change[own], 0.0))
            until = own[: top + 1] if peak > static else own[:0]
            passes = float(passing[until].sum())
            sums = np.bincount(about[until], weights=change[until], minlength=3)
            result.append(
                MemoryCurve(
                    time_s=time_s[own],
                    bytes=level,
                    static_bytes=static,
                    peak_bytes=max(static, peak),
                    peak_s=float(time_s[own][top]) if len(level) and peak > static else 0.0,
                    buffers_bytes=float(buffers.max()) if len(level) else 0.0,
                    left_bytes=-float(change[own][place[own] == end].sum()),
                    parts_bytes={
                        "saved": float(sums[COMPUTE]) - passes,
                        "passing": passes,
                        "messages": float(sums[RECEIVED] + sums[SENT]),
                    },
                )
            )
        return tuple(result)
