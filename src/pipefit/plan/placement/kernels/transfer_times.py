"""The inner loops of the placement search: times of transfers and rings, updated as devices are swapped.

The same code runs as plain Python and under numba (`compile`). All times are integer ticks (`links.TICK_S`) and sums of
loads are always recomputed in one order, so incremental updates give exactly the result of a full computation.
Arguments `links`, `plan`, `state`: see `tables`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipefit.plan.placement.kernels.rings import add_load, clear_load, ring_facts, term_ticks
from pipefit.plan.placement.kernels.tables import (
    CHANGES,
    KEEPS,
    LEADING,
    NEW_LEADING,
    STAMP,
    TOUCHED,
    USED,
    HostLinks,
    PlanTable,
    SearchState,
    SearchTables,
)


def link_ticks(a: int, b: int, size: int, links: HostLinks) -> tuple[int, int]:
    """Return (busy time of the ports, latency) of a message of that size from device `a` to device `b`."""
    from_host, to_host = links.host[a], links.host[b]
    if from_host != to_host:
        link = links.hop[a] + to_host
        return links.busy[size, link], links.latency[link]
    if a != b:
        return links.inside_busy[size, from_host], links.inside_latency[from_host]
    return 0, 0


def read_message(message: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Look up the times of a message between the devices at its slots."""
    a = state.device[plan.source[message]]
    b = state.device[plan.target[message]]
    busy, latency = link_ticks(a, b, plan.size[message], links)
    state.message_busy[message] = busy
    state.message_latency[message] = latency


def slot_cost(slot: int, device: int, links: HostLinks, plan: PlanTable, state: SearchState) -> int:
    """Return the ticks of a slot's slowest message if that device were there."""
    largest = 0
    for entry in range(plan.slot_start[slot], plan.slot_start[slot + 1]):
        message = plan.slot_messages[entry]
        source, target, size = plan.source[message], plan.target[message], plan.size[message]
        if source == slot:
            busy, latency = link_ticks(device, state.device[target], size, links)
        else:
            busy, latency = link_ticks(state.device[source], device, size, links)
        largest = max(largest, busy + latency)
    return largest


def flow_port(flow: int, links: HostLinks, plan: PlanTable, state: SearchState) -> int:
    """Return the ticks until the busiest port of a flow is free, if messages share ports:
    `cost.network.Network.transfer`."""
    begin, end = plan.flow_start[flow], plan.flow_start[flow + 1]
    largest = 0
    for message in range(begin, end):
        busy = state.message_busy[message]
        if busy > 0:
            a = state.device[plan.source[message]]
            b = state.device[plan.target[message]]
            largest = max(largest, add_load(a, b, busy, state.load, links))
    for message in range(begin, end):
        a = state.device[plan.source[message]]
        b = state.device[plan.target[message]]
        clear_load(a, b, state.load, links)
    return largest


def note_entry(entry: int, ticks: int, state: SearchState) -> None:
    """Note a change of one entry of x without applying it."""
    change = ticks - state.x[entry]
    if change != 0:
        state.changed_entry[state.counters[CHANGES]] = entry
        state.changed_by[state.counters[CHANGES]] = change
        state.counters[CHANGES] += 1


def touch_flow(flow: int, flows: int, links: HostLinks, state: SearchState) -> int:
    """Add a flow affected by a move to the list, with its present slowest messages; return the length of the list."""
    if state.seen_flow[flow] == state.counters[STAMP]:
        return flows
    state.seen_flow[flow] = state.counters[STAMP]
    state.flow_list[flows] = flow
    for fact in range(4):
        state.new_top[flow, fact] = state.top[flow, fact]
    state.rescan[flow] = 1 - links.single
    return flows + 1


def update_flow(flow: int, message: int, state: SearchState) -> None:
    """Update the slowest messages of a listed flow after a message changed; set `rescan` if the largest may have
    shrunk."""
    update_largest(flow, 0, message, state.message_busy[message], state)
    update_largest(flow, 2, message, state.message_latency[message], state)


def update_largest(flow: int, fact: int, message: int, ticks: int, state: SearchState) -> None:
    """Update the largest value at `fact` of `new_top` and its message after one message changed to `ticks`."""
    if ticks >= state.new_top[flow, fact]:
        state.new_top[flow, fact] = ticks
        state.new_top[flow, fact + 1] = message
    elif state.new_top[flow, fact + 1] == message:
        state.rescan[flow] = 1


def scan_flow(flow: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Compute the slowest messages of a flow from all of its messages."""
    scan_largest(flow, 0, state.message_busy, plan, state)
    scan_largest(flow, 2, state.message_latency, plan, state)
    if links.single == 0:
        state.new_top[flow, 0] = flow_port(flow, links, plan, state)


def scan_largest(flow: int, fact: int, ticks: Any, plan: PlanTable, state: SearchState) -> None:
    """Write the largest ticks of a flow's messages, and their message, at `fact` of `new_top`."""
    largest, slowest = 0, -1
    for message in range(plan.flow_start[flow], plan.flow_start[flow + 1]):
        if ticks[message] > largest:
            largest, slowest = ticks[message], message
    state.new_top[flow, fact] = largest
    state.new_top[flow, fact + 1] = slowest


def refresh_flow(flow: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Note the full time and the port time of a listed flow."""
    if state.rescan[flow] == 1:
        scan_flow(flow, links, plan, state)
    port = state.new_top[flow, 0]
    note_entry(flow, port + state.new_top[flow, 2], state)
    note_entry(plan.flows + flow, port, state)


def refresh_lane(lane: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Recompute the collectives and the compute of one lane."""
    first = 2 * plan.flows
    if plan.term_start[lane] < plan.term_start[lane + 1]:
        ring_facts(lane, links, plan, state)
        for term in range(plan.term_start[lane], plan.term_start[lane + 1]):
            note_entry(first + term, term_ticks(term, plan, state), state)
    first += plan.terms
    width = plan.replicas * plan.shards
    for row in range(plan.row_start[lane], plan.row_start[lane + 1]):
        largest = 0
        for slot in range(lane * width, (lane + 1) * width):
            largest = max(largest, plan.row_time[row * links.kinds + links.kind[state.device[slot]]])
        note_entry(first + row, largest, state)


def exchange(first: int, count: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Swap the contents of `moved_device` and of the slots `moved_slot`, for the entries from `first` to `count`."""
    for i in range(first, count):
        swap_in(i, state)
    for i in range(first, count):
        read_slot(state.moved_slot[i], links, plan, state)


def exchange_back(count: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Undo all exchanges of a move, the last one first: a slot may have been in several."""
    for i in range(count):
        swap_in(count - 1 - i, state)
    for i in range(count):
        read_slot(state.moved_slot[i], links, plan, state)


def swap_in(i: int, state: SearchState) -> None:
    """Swap one entry of a move: its device into its slot, and the slot's device into the entry."""
    slot = state.moved_slot[i]
    device = state.moved_device[i]
    state.moved_device[i] = state.device[slot]
    state.device[slot] = device
    state.slot_of[device] = slot


def read_slot(slot: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Look up all messages of a slot."""
    if slot < plan.slots:
        for entry in range(plan.slot_start[slot], plan.slot_start[slot + 1]):
            read_message(plan.slot_messages[entry], links, plan, state)


def refresh(count: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Recompute the times affected by the first `count` moved slots, and note the changed entries of x."""
    state.counters[STAMP] += 1
    state.counters[CHANGES] = 0
    stamp = state.counters[STAMP]
    width = plan.replicas * plan.shards
    flows, lanes = 0, 0
    for i in range(count):
        slot = state.moved_slot[i]
        if slot < plan.slots:
            lane = slot // width
            if state.counters[KEEPS] == 0 and state.seen_lane[lane] != stamp:
                state.seen_lane[lane] = stamp
                state.lane_list[lanes] = lane
                lanes += 1
            for entry in range(plan.slot_start[slot], plan.slot_start[slot + 1]):
                message = plan.slot_messages[entry]
                flow = plan.flow_of[message]
                flows = touch_flow(flow, flows, links, state)
                update_flow(flow, message, state)
    state.counters[TOUCHED] = flows
    for i in range(flows):
        refresh_flow(state.flow_list[i], links, plan, state)
    for i in range(lanes):
        refresh_lane(state.lane_list[i], links, plan, state)


def value_of(cut: int, state: SearchState) -> int:
    """Return the value of a cut with the noted changes."""
    value = state.value[cut]
    for i in range(state.counters[CHANGES]):
        value += state.weight[state.changed_entry[i], cut] * state.changed_by[i]
    return int(value)


def would_be(limit: Any, state: SearchState) -> int:
    """Return the estimate with the noted changes, or some value not below `limit` if the estimate is not.

    The leading cut is computed first, then the others in order, until one reaches the limit.
    """
    leading = state.counters[LEADING]
    best = value_of(leading, state)
    state.new_value[leading] = best
    state.counters[NEW_LEADING] = leading
    if best >= limit:
        return best
    for cut in range(state.counters[USED]):
        if cut != leading:
            value = value_of(cut, state)
            state.new_value[cut] = value
            if value > best:
                best = value
                state.counters[NEW_LEADING] = cut
                if best >= limit:
                    break
    return best


def commit(state: SearchState) -> None:
    """Apply the noted changes. Only after `would_be` returned a value below its limit."""
    for i in range(state.counters[CHANGES]):
        state.x[state.changed_entry[i]] += state.changed_by[i]
    state.counters[CHANGES] = 0
    for cut in range(state.counters[USED]):
        state.value[cut] = state.new_value[cut]
    state.counters[LEADING] = state.counters[NEW_LEADING]
    for i in range(state.counters[TOUCHED]):
        flow = state.flow_list[i]
        for fact in range(4):
            state.top[flow, fact] = state.new_top[flow, fact]


def recompute(tables: SearchTables) -> int:
    """Recompute everything from the devices at the slots; return the estimate in ticks."""
    links, plan, state = tables.links, tables.plan, tables.state
    for slot in range(links.devices):
        state.slot_of[state.device[slot]] = slot
    for message in range(plan.messages):
        read_message(message, links, plan, state)
    for cut in range(state.counters[USED]):
        state.value[cut] = state.constant[cut]
    for entry in range(plan.entries):
        state.x[entry] = 0
    state.counters[CHANGES], state.counters[STAMP], state.counters[TOUCHED] = 0, state.counters[STAMP] + 1, plan.flows
    for flow in range(plan.flows):
        touch_flow(flow, flow, links, state)
        state.rescan[flow] = 1
        refresh_flow(flow, links, plan, state)
    for lane in range(plan.lanes):
        refresh_lane(lane, links, plan, state)
    state.counters[LEADING] = 0
    best = would_be(np.inf, state)
    commit(state)
    return best
