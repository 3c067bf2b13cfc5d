"""The memory of every lane over time: tensors held between actions, transient memory of actions, and messages.

The rules for the lifetime of memory:

- An action that holds more memory afterwards allocates it at its start; an action that frees memory frees it at its
  end. Its transient memory (`peak_bytes`, with its inputs and outputs) lives from its start to its end.
- A receive buffer lives from the posting of its receive until the action that uses it starts.
- Gradients that a slice's backward leaves for the keys and values of earlier slices live until the next slice's
  backward starts.
- The output of an action lives from the action's end until the next stage on the same lane starts, or until it has been
  sent. In a computed schedule that is the end of the transfer. In a lowered schedule a later send of the same channel
  releases it: with w receives open at once at the receiver (`schedule/lowering/messages.py`), the w-th later send.

The static bytes of the lane are added throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipefit.cost.types import Array, CostTable, Ints
from pipefit.schedule.taskgraph.compile import TaskGraph, by_unit
from pipefit.schedule.taskgraph.table import CODE, RECV_B, RECV_F, SEND_B, SEND_F, B, F, I, W
from pipefit.schedule.taskgraph.times import TaskTimes, edge_table, match_edges, reach_times, spread_table


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The memory of one lane as a step function of time."""

    time_s: Array
    bytes: Array
    "Bytes in use from the time at this index to the next; simultaneous events are in the order they happen."
    static_bytes: float
    peak_bytes: float
    "The maximum of `bytes` and `static_bytes`."
    peak_s: float
    "The first time at which the peak is reached."
    buffers_bytes: float
    "The maximum sum of receive buffers."
    left_bytes: float
    "Sent tensors that are not released before the end of the lane's last action."
    parts_bytes: Mapping[str, float]
    "The peak without the static bytes, by part: `saved` (held between actions), `passing` (transient), `messages`."


def memory_curves(graph: TaskGraph, costs: CostTable, times: TaskTimes) -> tuple[MemoryCurve, ...]:
    """Return the memory curve of every lane."""
    events, reached_s = _MemoryEvents(), reach_times(graph, times)
    posted_s = post_times(graph, times, reached_s)
    compute = np.flatnonzero(graph.kind <= B)
    held, passing = (task_bytes[compute] for task_bytes in _task_bytes(graph, costs))
    lane, position = graph.lane[compute], EVENT_PLACES * graph.row[compute]
    events.add_change(lane, times.start_s[compute], position + START, np.maximum(held, 0.0) + passing, passing=passing)
    events.add_change(lane, times.stop_s[compute], position + STOP, np.minimum(held, 0.0) - passing, passing=-passing)
    transfers = np.flatnonzero(graph.consumer >= 0)
    if len(transfers):
        size, user = _edge_bytes(graph, costs, "bytes")[transfers], graph.consumer[transfers]
        events.add_change(graph.lane[user], posted_s[transfers], _posting_order(graph)[transfers], size, RECEIVED)
        events.add_change(graph.lane[user], times.start_s[user], EVENT_PLACES * graph.row[user] + TAKE, -size, RECEIVED)
        _add_sent(events, graph, costs, times, reached_s)
    _add_handed_on(events, graph, costs, times)
    _add_kv_gradients(events, graph, costs, times)
    _add_reductions(events, graph, costs, times)
    return events.lane_curves(costs.static_bytes, len(graph.schedule.lanes), EVENT_PLACES * len(graph.table.kind))


def post_times(graph: TaskGraph, times: TaskTimes, reached_s: Array) -> Array:
    """Return the time at which the receive of each transfer is posted (lowered) or the transfer starts (computed)."""
    posted: Array = times.start_s.copy()
    receives = np.flatnonzero((graph.table.kind == RECV_F) | (graph.table.kind == RECV_B))
    posted[graph.task[receives]] = reached_s[receives]
    return posted


EVENT_PLACES = 8
TAKE, START, STOP, GIVE = 1, 2, 6, 7
"""The order of simultaneous events of one action: it takes its inputs, starts, stops, hands on its outputs."""

REDUCING = 3.5
"""Hidden states alive in the last backward of a stage when the gradient reduction begins: the input of its first layer,
the recomputed output and its gradient, and the position tables."""

COMPUTE, RECEIVED, SENT = range(3)
"""The category of an event: memory of actions, receive buffers, or outputs that have not been sent yet."""


def _add_sent(events: _MemoryEvents, graph: TaskGraph, costs: CostTable, times: TaskTimes, reached_s: Array) -> None:
    """Add the outputs that senders keep until they have been sent."""
    transfers = np.flatnonzero(graph.consumer >= 0)
    size = _edge_bytes(graph, costs, "sent_bytes")[transfers]
    if not size.any():
        return
    if graph.schedule.is_lowered:
        maker = _producing_tasks(graph, transfers)
        left = _releasing_sends(graph, transfers)
        known = left >= 0
        last_s = np.zeros(len(graph.schedule.lanes))
        on_lane = graph.lane >= 0
        np.maximum.at(last_s, graph.lane[on_lane], np.maximum(times.stop_s, times.arrival_s)[on_lane])
        gone_s = np.where(known, reached_s[left], last_s[graph.lane[transfers]])
        gone = np.where(known, EVENT_PLACES * left + STOP, EVENT_PLACES * len(graph.table.kind))
    else:
        maker = graph.task[graph.row[transfers]]
        gone_s, gone = times.arrival_s[transfers], EVENT_PLACES * graph.row[transfers] + GIVE
    lane = graph.lane[transfers]
    events.add_change(lane, times.stop_s[maker], EVENT_PLACES * graph.row[maker] + GIVE, size, SENT)
    events.add_change(lane, np.maximum(gone_s, times.stop_s[maker]), gone, -size, SENT)


def _producing_tasks(graph: TaskGraph, transfers: Ints) -> Ints:
    """Return, for each transfer of a lowered schedule, the compute task of the same stage, microbatch and slice that
    produces its tensor."""
    forward, backward = _task_index(graph, (F,)), _task_index(graph, (I, B))
    unit = graph.stage[transfers], graph.microbatch[transfers], graph.slice[transfers]
    maker: Ints = np.where(graph.kind[transfers] == SEND_F, forward[unit], backward[unit])
    return maker


def _releasing_sends(graph: TaskGraph, transfers: Ints) -> Ints:
    """Return, for each SEND, the row of the SEND that releases its tensor; -1 is the end of the lane."""
    channel = 2 * graph.edge[transfers] + (graph.kind[transfers] == SEND_B)
    count, channels = len(transfers), int(channel.max()) + 1
    receive = np.zeros(graph.size, dtype=np.int64)
    rows = np.flatnonzero((graph.table.kind == RECV_F) | (graph.table.kind == RECV_B))
    receive[graph.task[rows]] = rows
    row = np.concatenate((receive[transfers], graph.row[graph.consumer[transfers]]))
    change = np.repeat([1, -1], count)
    both = np.concatenate((channel, channel))
    order = np.lexsort((row, both))
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
    """Add the outputs passed between two stages of one lane: from the end of the producer to the start of the
    consumer."""
    placement = graph.schedule.placement
    local = [edge for edge in costs.edges if placement[edge.source] == placement[edge.target]]
    if not local:
        return
    forward, backward = _task_index(graph, (F,)), _task_index(graph, (I, B))
    for edge in local:
        for producers, consumers, table in (
            (forward[edge.source], forward[edge.target], edge.forward_sent_bytes),
            (backward[edge.target], backward[edge.source], edge.backward_sent_bytes),
        ):
            there = (producers >= 0) & (consumers >= 0)
            size, producers, consumers = (
                np.broadcast_to(table, producers.shape)[there],
                producers[there],
                consumers[there],
            )
            events.add_change(
                graph.lane[producers], times.stop_s[producers], EVENT_PLACES * graph.row[producers] + GIVE, size, SENT
            )
            events.add_change(
                graph.lane[consumers], times.start_s[consumers], EVENT_PLACES * graph.row[consumers] + TAKE, -size, SENT
            )


def _add_kv_gradients(events: _MemoryEvents, graph: TaskGraph, costs: CostTable, times: TaskTimes) -> None:
    """Add the gradients that a backward leaves for the keys and values of earlier slices, until the next backward of
    its microbatch starts."""
    if not costs.kv_gradient_bytes.any():
        return
    backward = _task_index(graph, (I, B))
    there = (backward[:, :, 1:] >= 0) & (backward[:, :, :-1] >= 0)
    size = np.broadcast_to(costs.kv_gradient_bytes, backward.shape)[:, :, 1:][there]
    producers, consumers = backward[:, :, 1:][there], backward[:, :, :-1][there]
    events.add_change(graph.lane[producers], times.stop_s[producers], EVENT_PLACES * graph.row[producers] + GIVE, size)
    events.add_change(
        graph.lane[consumers], times.start_s[consumers], EVENT_PLACES * graph.row[consumers] + TAKE, -size
    )


def _add_reductions(events: _MemoryEvents, graph: TaskGraph, costs: CostTable, times: TaskTimes) -> None:
    """Add the memory of each stage's gradient reduction, from its last backward until the end.

    The reduction begins before that backward has released its last tensors (see `REDUCING`).
    """
    for stage in np.flatnonzero(np.broadcast_to(costs.reduce_copy_bytes, graph.schedule.num_stages)):
        backward_tasks = np.flatnonzero((graph.stage == stage) & ((graph.kind == B) | (graph.kind == W)))
        last = backward_tasks[[int(graph.row[backward_tasks].argmax())]]
        size = np.broadcast_to(costs.reduce_copy_bytes, graph.schedule.num_stages)[stage]
        near = [edge for edge in costs.edges if stage in (edge.source, edge.target)]
        ends = [edge.forward_bytes if edge.target == stage else edge.forward_sent_bytes for edge in near]
        hidden = max((float(tensor_bytes.max()) for tensor_bytes in ends), default=0.0)
        for change in (size, REDUCING * hidden, -REDUCING * hidden):
            events.add_change(
                graph.lane[last], times.stop_s[last], EVENT_PLACES * graph.row[last] + GIVE, np.full(1, change), SENT
            )


def _task_index(graph: TaskGraph, kinds: tuple[int, ...]) -> Ints:
    """Return the tasks of these kinds of actions by [stage, microbatch, slice]."""
    schedule = graph.schedule
    tasks = np.flatnonzero(np.isin(graph.kind, kinds))
    index = np.full((schedule.num_stages, schedule.microbatches, schedule.slices), -1, dtype=np.int64)
    index[graph.stage[tasks], graph.microbatch[tasks], graph.slice[tasks]] = tasks
    return by_unit(index, schedule)


def _task_bytes(graph: TaskGraph, costs: CostTable) -> tuple[Array, Array]:
    """Return, for every task, the bytes it leaves allocated and the transient bytes while it runs."""
    held, passing = np.zeros(graph.size), np.zeros(graph.size)
    for name in ("F", "I", "W", "B"):
        code = CODE[name]
        if code in graph.groups:
            tasks, table = graph.groups[code].tasks, costs.actions[name]
            held[tasks] = spread_table(graph, code, table.held_bytes)
            passing[tasks] = spread_table(graph, code, table.peak_bytes)
    return held, passing


def _edge_bytes(graph: TaskGraph, costs: CostTable, field: str) -> Array:
    """Return, for every task, the field `bytes` (the receive buffer) or `sent_bytes` of its transfer."""
    size = np.zeros(graph.size)
    matched = match_edges(graph.table.edges, costs)
    for code, direction in ((SEND_F, "forward"), (SEND_B, "backward")):
        if code in graph.groups:
            size[graph.groups[code].tasks] = spread_table(graph, code, edge_table(matched, f"{direction}_{field}"))
    return size


def _posting_order(graph: TaskGraph) -> Ints:
    """Return, for every transfer, the position of its posting among simultaneous events: at its RECV, or before its
    user."""
    position = EVENT_PLACES * graph.row[graph.consumer] - 1
    receives = np.flatnonzero((graph.table.kind == RECV_F) | (graph.table.kind == RECV_B))
    position[graph.task[receives]] = EVENT_PLACES * receives + START
    return position


class _MemoryEvents:
    """Changes of memory, collected in any order; each has a lane, a time and a position among simultaneous events."""

    def __init__(self) -> None:
        self.columns: list[tuple[Ints, Array, Ints, Array, Ints, Array]] = []

    def add_change(
        self,
        lane: Ints,
        time_s: Array,
        place: Ints,
        change: Array,
        about: int = COMPUTE,
        passing: Array | None = None,
    ) -> None:
        """Add changes; `passing` is the part of each change that is transient memory of an action."""
        none = np.zeros(len(change)) if passing is None else passing
        self.columns.append((lane, time_s, place, change, np.full(len(change), about), none))

    def lane_curves(self, static_bytes: Array, lanes: int, end: int) -> tuple[MemoryCurve, ...]:
        """Build the curves; `end` is the position of events at the end of a lane."""
        lane, time_s, position, change, about, passing = (
            np.concatenate(column) for column in zip(*self.columns, strict=True)
        )
        order = np.lexsort((position, time_s, lane))
        bounds = np.searchsorted(lane[order], np.arange(lanes + 1))
        result = []
        for i in range(lanes):
            on_lane = order[bounds[i] : bounds[i + 1]]
            static = float(static_bytes[i])
            level = static + np.cumsum(change[on_lane])
            top = int(level.argmax()) if len(level) else 0
            peak = float(level[top]) if len(level) else static
            buffers = np.cumsum(np.where(about[on_lane] == RECEIVED, change[on_lane], 0.0))
            until = on_lane[: top + 1] if peak > static else on_lane[:0]
            passes = float(passing[until].sum())
            sums = np.bincount(about[until], weights=change[until], minlength=3)
            result.append(
                MemoryCurve(
                    time_s=time_s[on_lane],
                    bytes=level,
                    static_bytes=static,
                    peak_bytes=max(static, peak),
                    peak_s=float(time_s[on_lane][top]) if len(level) and peak > static else 0.0,
                    buffers_bytes=float(buffers.max()) if len(level) else 0.0,
                    left_bytes=-float(change[on_lane][position[on_lane] == end].sum()),
                    parts_bytes={
                        "saved": float(sums[COMPUTE]) - passes,
                        "passing": passes,
                        "messages": float(sums[RECEIVED] + sums[SENT]),
                    },
                )
            )
        return tuple(result)
