"""The inner loops of the placement search: times of transfers and rings, updated as devices are swapped.

The same code runs as plain Python and under numba (`compile`). All times are integer ticks (`links.TICK_S`) and sums of
loads are always recomputed in one order, so incremental updates give exactly the result of a full computation.
Arguments `whole`, `real`, `at`: see `arena`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipefit.plan.placement.kernels.arena import (
    BUSY,
    CHANGED_BY,
    CHANGED_ENTRY,
    CHANGES,
    CONSTANT,
    CUT_ROOM,
    DEVICE,
    DEVICES,
    ENTRIES,
    FLOW_LIST,
    FLOW_OF,
    FLOW_START,
    FLOWS,
    HOST,
    HOSTS,
    INSIDE_BUSY,
    INSIDE_LATENCY,
    KEEPS,
    KIND,
    KINDS,
    LANE_COUNT,
    LANE_LIST,
    LATENCY,
    LEADING,
    LOAD,
    MATRICES,
    MATRIX,
    MESSAGE_BUSY,
    MESSAGE_LATENCY,
    MESSAGES,
    MOVED_DEVICE,
    MOVED_SLOT,
    NEW_LEADING,
    NEW_TOP,
    NEW_VALUE,
    RAIL,
    REPLICAS,
    RESCAN,
    ROW_START,
    ROW_TIME,
    SEEN_FLOW,
    SEEN_LANE,
    SHARDS,
    SINGLE,
    SIZE,
    SLOT_MESSAGES,
    SLOT_OF,
    SLOT_START,
    SLOTS,
    SOURCE,
    STAMP,
    TARGET,
    TERM_START,
    TERMS,
    TOP,
    TOUCHED,
    USED,
    VALUE,
    WEIGHT,
    X,
)
from pipefit.plan.placement.kernels.rings import add_load, clear_load, ring_facts, term_ticks


def link_ticks(a: int, b: int, size: int, whole: Any, at: Any) -> tuple[int, int]:
    """Return (busy time of the ports, latency) of a message of that size from device `a` to device `b`."""
    from_host, to_host, hosts = whole[at[HOST] + a], whole[at[HOST] + b], at[HOSTS]
    if from_host != to_host:
        matrix = whole[at[MATRIX] + whole[at[RAIL] + a]]
        link = (matrix * hosts + from_host) * hosts + to_host
        return whole[at[BUSY] + size * at[MATRICES] * hosts * hosts + link], whole[at[LATENCY] + link]
    if a != b:
        return whole[at[INSIDE_BUSY] + size * hosts + from_host], whole[at[INSIDE_LATENCY] + from_host]
    return 0, 0


def read_message(message: int, whole: Any, at: Any) -> None:
    """Look up the times of a message between the devices at its slots."""
    a = whole[at[DEVICE] + whole[at[SOURCE] + message]]
    b = whole[at[DEVICE] + whole[at[TARGET] + message]]
    busy, latency = link_ticks(a, b, whole[at[SIZE] + message], whole, at)
    whole[at[MESSAGE_BUSY] + message] = busy
    whole[at[MESSAGE_LATENCY] + message] = latency


def slot_cost(slot: int, device: int, whole: Any, at: Any) -> int:
    """Return the ticks of a slot's slowest message if that device were there."""
    largest = 0
    for entry in range(whole[at[SLOT_START] + slot], whole[at[SLOT_START] + slot + 1]):
        message = whole[at[SLOT_MESSAGES] + entry]
        source, target, size = whole[at[SOURCE] + message], whole[at[TARGET] + message], whole[at[SIZE] + message]
        if source == slot:
            busy, latency = link_ticks(device, whole[at[DEVICE] + target], size, whole, at)
        else:
            busy, latency = link_ticks(whole[at[DEVICE] + source], device, size, whole, at)
        largest = max(largest, busy + latency)
    return largest


def flow_port(flow: int, whole: Any, at: Any) -> int:
    """Return the ticks until the busiest port of a flow is free, if messages share ports:
    `cost.network.Network.transfer`."""
    begin, end = whole[at[FLOW_START] + flow], whole[at[FLOW_START] + flow + 1]
    largest = 0
    for message in range(begin, end):
        busy = whole[at[MESSAGE_BUSY] + message]
        if busy > 0:
            a = whole[at[DEVICE] + whole[at[SOURCE] + message]]
            b = whole[at[DEVICE] + whole[at[TARGET] + message]]
            largest = max(largest, add_load(a, b, busy, whole, at[LOAD], whole, at))
    for message in range(begin, end):
        a = whole[at[DEVICE] + whole[at[SOURCE] + message]]
        b = whole[at[DEVICE] + whole[at[TARGET] + message]]
        clear_load(a, b, whole, at[LOAD], whole, at)
    return largest


def note_entry(entry: int, ticks: int, whole: Any, at: Any) -> None:
    """Note a change of one entry of x without applying it."""
    change = ticks - whole[at[X] + entry]
    if change != 0:
        whole[at[CHANGED_ENTRY] + at[CHANGES]] = entry
        whole[at[CHANGED_BY] + at[CHANGES]] = change
        at[CHANGES] += 1


def touch_flow(flow: int, flows: int, whole: Any, at: Any) -> int:
    """Add a flow affected by a move to the list, with its present slowest messages; return the length of the list."""
    if whole[at[SEEN_FLOW] + flow] == at[STAMP]:
        return flows
    whole[at[SEEN_FLOW] + flow] = at[STAMP]
    whole[at[FLOW_LIST] + flows] = flow
    for fact in range(4):
        whole[at[NEW_TOP] + 4 * flow + fact] = whole[at[TOP] + 4 * flow + fact]
    whole[at[RESCAN] + flow] = 1 - at[SINGLE]
    return flows + 1


def update_flow(flow: int, message: int, whole: Any, at: Any) -> None:
    """Update the slowest messages of a listed flow after a message changed; set `rescan` if the largest may have
    shrunk."""
    top = at[NEW_TOP] + 4 * flow
    for time, fact in ((MESSAGE_BUSY, top), (MESSAGE_LATENCY, top + 2)):
        ticks = whole[at[time] + message]
        if ticks >= whole[fact]:
            whole[fact] = ticks
            whole[fact + 1] = message
        elif whole[fact + 1] == message:
            whole[at[RESCAN] + flow] = 1


def scan_flow(flow: int, whole: Any, at: Any) -> None:
    """Compute the slowest messages of a flow from all of its messages."""
    top = at[NEW_TOP] + 4 * flow
    for time, fact in ((MESSAGE_BUSY, top), (MESSAGE_LATENCY, top + 2)):
        largest, slowest = 0, -1
        for message in range(whole[at[FLOW_START] + flow], whole[at[FLOW_START] + flow + 1]):
            if whole[at[time] + message] > largest:
                largest, slowest = whole[at[time] + message], message
        whole[fact] = largest
        whole[fact + 1] = slowest
    if at[SINGLE] == 0:
        whole[top] = flow_port(flow, whole, at)


def refresh_flow(flow: int, whole: Any, at: Any) -> None:
    """Note the full time and the port time of a listed flow."""
    if whole[at[RESCAN] + flow] == 1:
        scan_flow(flow, whole, at)
    port = whole[at[NEW_TOP] + 4 * flow]
    note_entry(flow, port + whole[at[NEW_TOP] + 4 * flow + 2], whole, at)
    note_entry(at[FLOWS] + flow, port, whole, at)


def refresh_lane(lane: int, whole: Any, real: Any, at: Any) -> None:
    """Recompute the collectives and the compute of one lane."""
    first = 2 * at[FLOWS]
    if whole[at[TERM_START] + lane] < whole[at[TERM_START] + lane + 1]:
        ring_facts(lane, whole, real, at)
        for term in range(whole[at[TERM_START] + lane], whole[at[TERM_START] + lane + 1]):
            note_entry(first + term, term_ticks(term, whole, real, at), whole, at)
    first += at[TERMS]
    width = at[REPLICAS] * at[SHARDS]
    for row in range(whole[at[ROW_START] + lane], whole[at[ROW_START] + lane + 1]):
        largest = 0
        for slot in range(lane * width, (lane + 1) * width):
            largest = max(largest, whole[at[ROW_TIME] + row * at[KINDS] + whole[at[KIND] + whole[at[DEVICE] + slot]]])
        note_entry(first + row, largest, whole, at)


def exchange(first: int, count: int, whole: Any, at: Any) -> None:
    """Swap the contents of `moved_device` and of the slots `moved_slot`, for the entries from `first` to `count`."""
    for i in range(first, count):
        swap_in(i, whole, at)
    for i in range(first, count):
        read_slot(whole[at[MOVED_SLOT] + i], whole, at)


def exchange_back(count: int, whole: Any, at: Any) -> None:
    """Undo all exchanges of a move, the last one first: a slot may have been in several."""
    for i in range(count):
        swap_in(count - 1 - i, whole, at)
    for i in range(count):
        read_slot(whole[at[MOVED_SLOT] + i], whole, at)


def swap_in(i: int, whole: Any, at: Any) -> None:
    """Swap one entry of a move: its device into its slot, and the slot's device into the entry."""
    slot = whole[at[MOVED_SLOT] + i]
    device = whole[at[MOVED_DEVICE] + i]
    whole[at[MOVED_DEVICE] + i] = whole[at[DEVICE] + slot]
    whole[at[DEVICE] + slot] = device
    whole[at[SLOT_OF] + device] = slot


def read_slot(slot: int, whole: Any, at: Any) -> None:
    """Look up all messages of a slot."""
    if slot < at[SLOTS]:
        for entry in range(whole[at[SLOT_START] + slot], whole[at[SLOT_START] + slot + 1]):
            read_message(whole[at[SLOT_MESSAGES] + entry], whole, at)


def refresh(count: int, whole: Any, real: Any, at: Any) -> None:
    """Recompute the times affected by the first `count` moved slots, and note the changed entries of x."""
    at[STAMP] += 1
    at[CHANGES] = 0
    stamp = at[STAMP]
    width = at[REPLICAS] * at[SHARDS]
    flows, lanes = 0, 0
    for i in range(count):
        slot = whole[at[MOVED_SLOT] + i]
        if slot < at[SLOTS]:
            lane = slot // width
            if at[KEEPS] == 0 and whole[at[SEEN_LANE] + lane] != stamp:
                whole[at[SEEN_LANE] + lane] = stamp
                whole[at[LANE_LIST] + lanes] = lane
                lanes += 1
            for entry in range(whole[at[SLOT_START] + slot], whole[at[SLOT_START] + slot + 1]):
                message = whole[at[SLOT_MESSAGES] + entry]
                flow = whole[at[FLOW_OF] + message]
                flows = touch_flow(flow, flows, whole, at)
                update_flow(flow, message, whole, at)
    at[TOUCHED] = flows
    for i in range(flows):
        refresh_flow(whole[at[FLOW_LIST] + i], whole, at)
    for i in range(lanes):
        refresh_lane(whole[at[LANE_LIST] + i], whole, real, at)


def value_of(cut: int, whole: Any, at: Any) -> int:
    """Return the value of a cut with the noted changes."""
    value, weights, room = whole[at[VALUE] + cut], at[WEIGHT] + cut, at[CUT_ROOM]
    entries, changes = at[CHANGED_ENTRY], at[CHANGED_BY]
    for i in range(at[CHANGES]):
        value += whole[weights + whole[entries + i] * room] * whole[changes + i]
    return int(value)


def would_be(limit: Any, whole: Any, at: Any) -> int:
    """Return the estimate with the noted changes, or some value not below `limit` if the estimate is not.

    The leading cut is computed first, then the others in order, until one reaches the limit.
    """
    leading = at[LEADING]
    best = value_of(leading, whole, at)
    whole[at[NEW_VALUE] + leading] = best
    at[NEW_LEADING] = leading
    if best >= limit:
        return best
    for cut in range(at[USED]):
        if cut != leading:
            value = value_of(cut, whole, at)
            whole[at[NEW_VALUE] + cut] = value
            if value > best:
                best = value
                at[NEW_LEADING] = cut
                if best >= limit:
                    break
    return best


def commit(whole: Any, at: Any) -> None:
    """Apply the noted changes. Only after `would_be` returned a value below its limit."""
    for i in range(at[CHANGES]):
        whole[at[X] + whole[at[CHANGED_ENTRY] + i]] += whole[at[CHANGED_BY] + i]
    at[CHANGES] = 0
    for cut in range(at[USED]):
        whole[at[VALUE] + cut] = whole[at[NEW_VALUE] + cut]
    at[LEADING] = at[NEW_LEADING]
    for i in range(at[TOUCHED]):
        flow = whole[at[FLOW_LIST] + i]
        for fact in range(4 * flow, 4 * flow + 4):
            whole[at[TOP] + fact] = whole[at[NEW_TOP] + fact]


def recompute(whole: Any, real: Any, at: Any) -> int:
    """Recompute everything from the devices at the slots; return the estimate in ticks."""
    for slot in range(at[DEVICES]):
        whole[at[SLOT_OF] + whole[at[DEVICE] + slot]] = slot
    for message in range(at[MESSAGES]):
        read_message(message, whole, at)
    for cut in range(at[USED]):
        whole[at[VALUE] + cut] = whole[at[CONSTANT] + cut]
    for entry in range(at[ENTRIES]):
        whole[at[X] + entry] = 0
    at[CHANGES], at[STAMP], at[TOUCHED] = 0, at[STAMP] + 1, at[FLOWS]
    for flow in range(at[FLOWS]):
        touch_flow(flow, flow, whole, at)
        whole[at[RESCAN] + flow] = 1
        refresh_flow(flow, whole, at)
    for lane in range(at[LANE_COUNT]):
        refresh_lane(lane, whole, real, at)
    at[LEADING] = 0
    best = would_be(np.inf, whole, at)
    commit(whole, at)
    return best
