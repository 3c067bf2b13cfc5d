"""Receive buffers: as many as the schedule itself ever has in flight, and none reused early.

Pure. A message occupies its buffer from its RECV until the last compute action of its (stage, microbatch, slice):
the forward saves its input, and a pending weight gradient its output's gradient, so neither may be overwritten
sooner. Lifetimes on one lane are intervals, so greedy colouring in order of arrival is optimal.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from pipefit.schedule.actions import COMPUTE, Action


def last_uses(lane: Sequence[Action]) -> dict[tuple[int, int, int], int]:
    """The index of the last compute action of every (stage, microbatch, slice) of a lane."""
    return {(a.stage, a.microbatch, a.slice): index for index, a in enumerate(lane) if a.kind in COMPUTE}


def posted_early(lane: Sequence[Action]) -> dict[int, int]:
    """RECV index -> index of the compute action before which it is posted instead, where that is earlier.

    Each message is posted when the one before it on its channel is about to be used. The sender then finds its peer
    ready and writes at once, which saves gloo a round of notifications; it costs one more buffer per channel. Early
    receives cannot deadlock, and the order within a channel stays. (Not for NCCL, whose waiting receives take up
    the device.)
    """
    consumers = _consumers(lane)
    before: dict[tuple[object, ...], int] = {}
    hosts: dict[int, int] = {}
    for index, action in enumerate(lane):
        if action.kind.startswith("RECV"):
            channel = (action.kind, action.stage, action.peer, action.what)
            host = consumers[before[channel]] if channel in before else index
            if host < index:
                hosts[index] = host
            before[channel] = index
    return hosts


def assign_slots(lane: Sequence[Action], early: Mapping[int, int] | None = None) -> dict[int, int]:
    """RECV index -> slot number within its ring. Rings are per (kind, stage, peer, tensor, slice).

    The size of a ring is its largest slot plus one: the greatest number of such messages alive at once. `early` is
    what `posted_early` gives, where it is used.
    """
    early = early or {}
    last = last_uses(lane)
    free: dict[tuple[object, ...], list[int]] = {}
    busy: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    slots: dict[int, int] = {}
    receives = [index for index, action in enumerate(lane) if action.kind.startswith("RECV")]
    for index in sorted(receives, key=lambda i: (early.get(i, i), i)):
        action, begin = lane[index], early.get(index, index)
        ring = ring_key(action)
        waiting, open_slots = busy.setdefault(ring, []), free.setdefault(ring, [])
        while waiting and waiting[0][0] < begin:
            heapq.heappush(open_slots, heapq.heappop(waiting)[1])
        slot = heapq.heappop(open_slots) if open_slots else len(waiting)
        slots[index] = slot
        heapq.heappush(waiting, (last[action.stage, action.microbatch, action.slice], slot))
    return slots


def ring_key(action: Action) -> tuple[object, ...]:
    """What messages share a ring: they have equal shapes and one channel."""
    return (action.kind, action.stage, action.peer, action.what, action.slice)


def ring_sizes(lane: Sequence[Action]) -> dict[tuple[object, ...], int]:
    """The number of buffers of every ring of a lane."""
    sizes: dict[tuple[object, ...], int] = {}
    for index, slot in assign_slots(lane).items():
        key = ring_key(lane[index])
        sizes[key] = max(sizes.get(key, 0), slot + 1)
    return sizes


def _consumers(lane: Sequence[Action]) -> dict[int, int]:
    """RECV index -> index of the action that takes the message: F, or the I or B."""
    place = {(a.kind in ("I", "B"), a.stage, a.microbatch, a.slice): i for i, a in enumerate(lane) if a.kind in "FIB"}
    return {
        index: place[action.kind == "RECV_B", action.stage, action.microbatch, action.slice]
        for index, action in enumerate(lane)
        if action.kind.startswith("RECV")
    }
