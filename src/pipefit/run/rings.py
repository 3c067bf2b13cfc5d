"""Receive buffers: as many as the schedule itself ever has in flight, and none reused early.

Pure. A message occupies its buffer from its RECV until the last compute action of its (stage, microbatch, slice):
the forward saves its input, and a pending weight gradient its output's gradient, so neither may be overwritten
sooner. Lifetimes on one lane are intervals, so greedy colouring in order of arrival is optimal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pipefit.schedule.actions import COMPUTE, Action


def last_uses(lane: Sequence[Action]) -> dict[tuple[int, int, int], int]:
    """The index of the last compute action of every (stage, microbatch, slice) of a lane."""
    return {(a.stage, a.microbatch, a.slice): index for index, a in enumerate(lane) if a.kind in COMPUTE}


def assign_slots(lane: Sequence[Action]) -> dict[int, int]:
    """RECV index -> slot number within its ring. Rings are per (kind, stage, peer, tensor, slice).

    The size of a ring is its largest slot plus one: the greatest number of such messages alive at once.
    """
    last = last_uses(lane)
    free: dict[tuple[object, ...], list[int]] = {}
    busy: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    slots: dict[int, int] = {}
    for index, action in enumerate(lane):
        if not action.kind.startswith("RECV"):
            continue
        ring = ring_key(action)
        waiting, open_slots = busy.setdefault(ring, []), free.setdefault(ring, [])
        while waiting and waiting[0][0] < index:
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
