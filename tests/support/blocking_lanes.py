"""Runs the lanes of a lowered schedule in real processes that talk through sockets: one first-in first-out stream for
each directed pair of lanes, blocking sends, receives that read from the moment they are posted.

The kernel's socket buffer is the eager size: a smaller message leaves at once, a larger one only while somebody reads.
No torch: what is tried is the order, not the tensors. Each message carries the name of what it is.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import threading
import time
from itertools import permutations
from queue import SimpleQueue
from typing import Any

from pipefit.schedule import Schedule
from pipefit.schedule.actions import Action
from pipefit.schedule.check.deadlock import MessageKey, message_name

EAGER, LARGE = 64, 4 << 20
"""Bytes of a message that any socket buffer takes, and of one that none does."""

BUFFER = 64 << 10


def deferred(schedule: Schedule) -> Schedule:
    """Every receive moved to just before its use, as PyTorch's `defer_pp_recv` does."""
    lanes = []
    for actions in schedule.lanes:
        body = []
        for action in actions:
            if action.kind in ("F", "I", "B"):
                kind = "RECV_F" if action.kind == "F" else "RECV_B"
                body += [one for one in actions if one.kind == kind and one[1:4] == action[1:4]]
            if not action.kind.startswith("RECV"):
                body.append(action)
        lanes.append(tuple(body))
    return Schedule(
        name=schedule.name, placement=schedule.placement, microbatches=schedule.microbatches, slices=1,
        lanes=tuple(lanes),
    )  # fmt: skip


def run_lanes(schedule: Schedule, size: int, limit_s: float) -> tuple[str, list[int]]:
    """("done", "stuck" or what a process found wrong, how many actions each lane has done).

    Stuck: no lane has done anything for `limit_s` seconds. The processes are ended in any case.
    """
    context = multiprocessing.get_context("spawn")
    count = len(schedule.lanes)
    ways = {pair: socket.socketpair() for pair in permutations(range(count), 2)}
    for pair in ways.values():
        for end in pair:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    progress, wrong = context.Array("i", count, lock=False), context.SimpleQueue()
    processes = []
    for lane in range(count):
        sends = {target: ends[0] for (source, target), ends in ways.items() if source == lane}
        receives = {source: ends[1] for (source, target), ends in ways.items() if target == lane}
        arguments = (schedule, lane, size, sends, receives, progress, wrong)
        processes.append(context.Process(target=_lane, args=arguments, daemon=True))
    try:
        for process in processes:
            process.start()
        return _watch(processes, progress, wrong, [len(lane) for lane in schedule.lanes], limit_s), list(progress)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pair in ways.values():
            for end in pair:
                end.close()


def _watch(processes: list[Any], progress: Any, wrong: Any, wanted: list[int], limit_s: float) -> str:
    before, since = list(progress), time.monotonic()
    while list(progress) != wanted:
        time.sleep(0.02)
        if not wrong.empty():
            return str(wrong.get())
        started = all(progress)  # a lane that has not begun is not stuck: its process still imports
        if list(progress) != before or (not started and time.monotonic() - since < 60):
            if list(progress) != before:
                before, since = list(progress), time.monotonic()
        elif time.monotonic() - since > limit_s:
            return "stuck"
    return "done"


def _lane(
    schedule: Schedule, lane: int, size: int, sends: dict[int, Any], receives: dict[int, Any], progress: Any, wrong: Any
) -> None:
    placement = schedule.placement
    posts: dict[int, SimpleQueue[tuple[MessageKey, threading.Event]]] = {other: SimpleQueue() for other in receives}
    arrived: dict[MessageKey, threading.Event] = {}
    for other, end in receives.items():
        threading.Thread(target=_read, args=(end, posts[other], wrong), daemon=True).start()
    for step, action in enumerate(schedule.lanes[lane]):
        if action.kind.startswith("RECV"):
            arrived[message_name(action)] = event = threading.Event()
            posts[placement[action.peer]].put((message_name(action), event))
        elif action.kind.startswith("SEND"):
            name = repr(message_name(action)).encode()
            sends[placement[action.peer]].sendall(struct.pack("II", len(name), size) + name + bytes(size))
        elif action.kind in ("F", "I", "B"):
            for name in _inputs(schedule.lanes[lane], action):
                arrived[name].wait()
        progress[lane] = step + 1
    time.sleep(60)  # the sockets stay open until everybody is done


def _inputs(actions: tuple[Action, ...], action: Action) -> list[MessageKey]:
    kind = "RECV_F" if action.kind == "F" else "RECV_B"
    return [message_name(one) for one in actions if one.kind == kind and one[1:4] == action[1:4]]


def _read(end: Any, posts: SimpleQueue[tuple[MessageKey, threading.Event]], wrong: Any) -> None:
    """Take one message off the stream for every receive that is posted, in order."""
    while True:
        expected, event = posts.get()
        length, size = struct.unpack("II", _exactly(end, 8))
        name = _exactly(end, length).decode()
        _exactly(end, size)
        if name != repr(expected):
            wrong.put(f"{name} arrived for {expected!r}")
            return
        event.set()


def _exactly(end: Any, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = end.recv(min(count - len(parts), 1 << 16))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
