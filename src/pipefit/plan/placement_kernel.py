"""The inner loops of the placement search: times of transfers and rings, kept up as devices change places.

Written once, so that they run as plain Python and, compiled, under numba (`placement_compile`). All times are whole
ticks (`placement_links.TICK_S`) and sums of loads are made anew in one order, so that changing a placement step by
step gives exactly what working it out from nothing gives. Arguments `whole`, `real`, `at`: see `placement_arena`.
"""

from __future__ import annotations

from typing import Any

from pipefit.plan.placement_arena import (
    BUSY,
    BYTE_FACTOR,
    BYTES,
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
    INSIDE_PER_BYTE,
    KEEPS,
    KIND,
    KINDS,
    LANE_COUNT,
    LANE_LIST,
    LATENCY,
    LATENCY_FACTOR,
    LEADING,
    LINE_BESIDE,
    LINE_SHARE,
    LINE_START,
    LOAD,
    LOAD_PER_BYTE,
    MATRICES,
    MATRIX,
    MESSAGE_BUSY,
    MESSAGE_LATENCY,
    MESSAGES,
    MORE,
    MOVED_DEVICE,
    MOVED_SLOT,
    ORDER,
    PASSES,
    PER_BYTE,
    RAIL,
    RAILS,
    REPLICAS,
    RING,
    ROW_START,
    ROW_TIME,
    SEEN_FLOW,
    SEEN_LANE,
    SHARDS,
    SHARE,
    SHARED,
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
    UNDO,
    UNDO_ENTRY,
    UNDO_X,
    USED,
    VALUE,
    WEIGHT,
    X,
)
from pipefit.plan.placement_links import TICK_S


def add_load(a: int, b: int, amount: Any, load: Any, base: int, whole: Any, at: Any) -> Any:
    """Add to the ports that a message from device `a` to device `b` keeps busy; the larger of their loads. The loads
    stand in the arena `load` from `base` on.

    Ports: [device] inside its host, [device] of its own between hosts, [host, rail] out, [host, rail] in.
    """
    from_host, to_host = whole[at[HOST] + a], whole[at[HOST] + b]
    if from_host == to_host:
        load[base + a] += amount
        return load[base + a]
    rail = whole[at[RAIL] + a]
    if whole[at[SHARED] + rail] == 0:
        load[base + at[DEVICES] + a] += amount
        return load[base + at[DEVICES] + a]
    ports = base + 2 * at[DEVICES] + rail
    out, into = ports + from_host * at[RAILS], ports + (at[HOSTS] + to_host) * at[RAILS]
    load[out] += amount
    load[into] += amount
    return max(load[out], load[into])


def clear_load(a: int, b: int, load: Any, base: int, whole: Any, at: Any) -> None:
    """Set to zero what `add_load` added to."""
    load[base + a] = 0
    load[base + at[DEVICES] + a] = 0
    ports = base + 2 * at[DEVICES] + whole[at[RAIL] + a]
    load[ports + whole[at[HOST] + a] * at[RAILS]] = 0
    load[ports + (at[HOSTS] + whole[at[HOST] + b]) * at[RAILS]] = 0


def ring_device(lane: int, shard: int, i: int, whole: Any, at: Any) -> int:
    """The i-th device of a lane's ring, in ascending order."""
    return int(whole[at[DEVICE] + whole[at[ORDER] + (lane * at[SHARDS] + shard) * at[REPLICAS] + i]])


def link_ticks(a: int, b: int, size: int, whole: Any, at: Any) -> tuple[int, int]:
    """(busy time of the ports, latency) of a message of that size from device `a` to device `b`."""
    from_host, to_host, hosts = whole[at[HOST] + a], whole[at[HOST] + b], at[HOSTS]
    if from_host != to_host:
        matrix = whole[at[MATRIX] + whole[at[RAIL] + a]]
        link = (matrix * hosts + from_host) * hosts + to_host
        return whole[at[BUSY] + size * at[MATRICES] * hosts * hosts + link], whole[at[LATENCY] + link]
    if a != b:
        return whole[at[INSIDE_BUSY] + size * hosts + from_host], whole[at[INSIDE_LATENCY] + from_host]
    return 0, 0


def read_message(message: int, whole: Any, at: Any) -> None:
    """Look up the times of a message between the devices that stand at its slots."""
    a = whole[at[DEVICE] + whole[at[SOURCE] + message]]
    b = whole[at[DEVICE] + whole[at[TARGET] + message]]
    busy, latency = link_ticks(a, b, whole[at[SIZE] + message], whole, at)
    whole[at[MESSAGE_BUSY] + message] = busy
    whole[at[MESSAGE_LATENCY] + message] = latency


def slot_cost(slot: int, device: int, whole: Any, at: Any) -> int:
    """Ticks of the slowest message of a slot if that device stood there."""
    most = 0
    for entry in range(whole[at[SLOT_START] + slot], whole[at[SLOT_START] + slot + 1]):
        message = whole[at[SLOT_MESSAGES] + entry]
        source, target, size = whole[at[SOURCE] + message], whole[at[TARGET] + message], whole[at[SIZE] + message]
        if source == slot:
            busy, latency = link_ticks(device, whole[at[DEVICE] + target], size, whole, at)
        else:
            busy, latency = link_ticks(whole[at[DEVICE] + source], device, size, whole, at)
        most = max(most, busy + latency)
    return most


def flow_port(flow: int, whole: Any, at: Any) -> int:
    """Ticks until the busiest port of a flow is free, where messages share ports: `cost.network.Network.transfer`."""
    begin, end = whole[at[FLOW_START] + flow], whole[at[FLOW_START] + flow + 1]
    most = 0
    for message in range(begin, end):
        busy = whole[at[MESSAGE_BUSY] + message]
        if busy > 0:
            a = whole[at[DEVICE] + whole[at[SOURCE] + message]]
            b = whole[at[DEVICE] + whole[at[TARGET] + message]]
            most = max(most, add_load(a, b, busy, whole, at[LOAD], whole, at))
    for message in range(begin, end):
        a = whole[at[DEVICE] + whole[at[SOURCE] + message]]
        b = whole[at[DEVICE] + whole[at[TARGET] + message]]
        clear_load(a, b, whole, at[LOAD], whole, at)
    return most


def sort_rings(lane: int, whole: Any, at: Any) -> None:
    """Bring the lane's slots into the order of their devices. Mostly they are nearly so from the last time."""
    for shard in range(at[SHARDS]):
        first = at[ORDER] + (lane * at[SHARDS] + shard) * at[REPLICAS]
        for i in range(first + 1, first + at[REPLICAS]):
            slot = whole[i]
            device = whole[at[DEVICE] + slot]
            j = i - 1
            while j >= first and whole[at[DEVICE] + whole[j]] > device:
                whole[j + 1] = whole[j]
                j -= 1
            whole[j + 1] = slot


def ring_hops(lane: int, step: int, whole: Any, real: Any, at: Any) -> None:
    """Latency and load of the rings through every `step`-th device of the lane's sorted rings: flat for 1. Fills the
    facts 1 and 2 for step 1, else 8 and 9."""
    most, latency = 0.0, 0
    hosts, replicas = at[HOSTS], at[REPLICAS]
    for shard in range(at[SHARDS]):
        first = at[ORDER] + (lane * at[SHARDS] + shard) * replicas
        for i in range(replicas):
            after = i + step if i + step < replicas else i + step - replicas
            a, b = whole[at[DEVICE] + whole[first + i]], whole[at[DEVICE] + whole[first + after]]
            from_host, to_host = whole[at[HOST] + a], whole[at[HOST] + b]
            if from_host == to_host:
                wait, per_byte = whole[at[INSIDE_LATENCY] + from_host], real[at[INSIDE_PER_BYTE] + from_host]
            else:
                link = (whole[at[MATRIX] + whole[at[RAIL] + a]] * hosts + from_host) * hosts + to_host
                wait, per_byte = whole[at[LATENCY] + link], real[at[PER_BYTE] + link]
            if at[SINGLE] == 0:
                per_byte = add_load(a, b, per_byte, real, at[LOAD_PER_BYTE], whole, at)
            most, latency = max(most, per_byte), max(latency, wait)
    if at[SINGLE] == 0:
        for shard in range(at[SHARDS]):
            for i in range(replicas):
                a = ring_device(lane, shard, i, whole, at)
                b = ring_device(lane, shard, (i + step) % replicas, whole, at)
                clear_load(a, b, real, at[LOAD_PER_BYTE], whole, at)
    fact = at[RING] + (1 if step == 1 else 8)
    real[fact] = latency
    real[fact + 1] = most


def ring_levels(lane: int, whole: Any, real: Any, at: Any) -> int:
    """Devices of each ring on each of its hosts, if that is one number above 1 and there are several hosts; else 0.
    Fills 5 and 6 of the facts: the rings inside the hosts (`cost.collectives`)."""
    per_host = 0
    latency, per_byte = 0, 0.0
    for shard in range(at[SHARDS]):
        run = 0
        for i in range(at[REPLICAS]):
            host = whole[at[HOST] + ring_device(lane, shard, i, whole, at)]
            run += 1
            last = i + 1 == at[REPLICAS]
            if last or whole[at[HOST] + ring_device(lane, shard, i + 1, whole, at)] != host:
                if per_host == 0:
                    per_host = run
                if run != per_host or run == 1 or run == at[REPLICAS]:
                    return 0
                run = 0
                latency = max(latency, whole[at[INSIDE_LATENCY] + host])
                per_byte = max(per_byte, real[at[INSIDE_PER_BYTE] + host])
    real[at[RING] + 5] = latency
    real[at[RING] + 6] = per_byte
    return per_host


def ring_facts(lane: int, whole: Any, real: Any, at: Any) -> None:
    """Fill the facts: 0 hops, 1 latency, 2 seconds a byte of the flat rings; 3 devices on each host or 0; if not 0,
    4 hops, 5 latency, 6 seconds a byte inside the hosts, 7, 8 and 9 the same between them."""
    sort_rings(lane, whole, at)
    ring_hops(lane, 1, whole, real, at)
    per_host = ring_levels(lane, whole, real, at) if at[SINGLE] == 0 else 0
    real[at[RING]] = at[REPLICAS]
    real[at[RING] + 3] = per_host
    if per_host > 0:
        ring_hops(lane, per_host, whole, real, at)
        real[at[RING] + 4] = per_host
        real[at[RING] + 7] = at[REPLICAS] // per_host


def pass_ticks(first: int, total_bytes: float, latency_factor: float, byte_factor: float, real: Any, at: Any) -> float:
    """One pass of rings whose facts stand from `first` on: `cost.network.RingTime.pass_s`, in ticks."""
    facts = at[RING] + first
    hops = real[facts]
    if hops <= 1:
        return 0.0
    seconds = total_bytes / hops * real[facts + 2] * byte_factor
    return float((hops - 1) * (real[facts + 1] * latency_factor + seconds / TICK_S))


def term_ticks(term: int, whole: Any, real: Any, at: Any) -> int:
    """What is left of a collective, given the facts of its lane's rings: `cost.collectives`, `cost.overlap`."""
    total_bytes = real[at[BYTES] + term]
    latency_factor, byte_factor = real[at[LATENCY_FACTOR] + term], real[at[BYTE_FACTOR] + term]
    one = pass_ticks(0, total_bytes, latency_factor, byte_factor, real, at)
    per_host = real[at[RING] + 3]
    if per_host > 0:
        across = pass_ticks(7, total_bytes / per_host, latency_factor, byte_factor, real, at)
        one = min(one, across + pass_ticks(4, total_bytes, latency_factor, byte_factor, real, at))
    once = whole[at[PASSES] + term] * one + whole[at[MORE] + term]
    left = 0.0
    for line in range(whole[at[LINE_START] + term], whole[at[LINE_START] + term + 1]):
        left = max(left, real[at[LINE_SHARE] + line] * once - real[at[LINE_BESIDE] + line])
    return int(once - real[at[SHARE] + term] * (once - left) + 0.5)


def set_x(entry: int, ticks: int, whole: Any, at: Any) -> None:
    """Change one entry of x, and the value of every cut with it."""
    change = ticks - whole[at[X] + entry]
    if change == 0:
        return
    whole[at[UNDO_ENTRY] + at[UNDO]] = entry
    whole[at[UNDO_X] + at[UNDO]] = whole[at[X] + entry]
    at[UNDO] += 1
    whole[at[X] + entry] = ticks
    weights, values = at[WEIGHT] + entry * at[CUT_ROOM], at[VALUE]
    for cut in range(at[USED]):
        whole[values + cut] += whole[weights + cut] * change


def refresh_flow(flow: int, whole: Any, at: Any) -> None:
    """Work out one flow again: its whole time and its port time."""
    begin, end = whole[at[FLOW_START] + flow], whole[at[FLOW_START] + flow + 1]
    port, latency = 0, 0
    for message in range(begin, end):
        port = max(port, whole[at[MESSAGE_BUSY] + message])
        latency = max(latency, whole[at[MESSAGE_LATENCY] + message])
    if at[SINGLE] == 0:
        port = flow_port(flow, whole, at)
    set_x(flow, port + latency, whole, at)
    set_x(at[FLOWS] + flow, port, whole, at)


def refresh_lane(lane: int, whole: Any, real: Any, at: Any) -> None:
    """Work out the collectives and the computing of one lane again."""
    first = 2 * at[FLOWS]
    if whole[at[TERM_START] + lane] < whole[at[TERM_START] + lane + 1]:
        ring_facts(lane, whole, real, at)
        for term in range(whole[at[TERM_START] + lane], whole[at[TERM_START] + lane + 1]):
            set_x(first + term, term_ticks(term, whole, real, at), whole, at)
    first += at[TERMS]
    width = at[REPLICAS] * at[SHARDS]
    for row in range(whole[at[ROW_START] + lane], whole[at[ROW_START] + lane + 1]):
        most = 0
        for slot in range(lane * width, (lane + 1) * width):
            most = max(most, whole[at[ROW_TIME] + row * at[KINDS] + whole[at[KIND] + whole[at[DEVICE] + slot]]])
        set_x(first + row, most, whole, at)


def exchange(first: int, count: int, whole: Any, at: Any) -> None:
    """Put `moved_device` into `moved_slot`, from entry `first` to `count`, and what stood there into `moved_device`."""
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
    """One entry of a move: its device into its slot, and the other way round."""
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
    """Work out again what the first `count` moved slots touch."""
    at[STAMP] += 1
    at[UNDO] = 0
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
                flow = whole[at[FLOW_OF] + whole[at[SLOT_MESSAGES] + entry]]
                if whole[at[SEEN_FLOW] + flow] != stamp:
                    whole[at[SEEN_FLOW] + flow] = stamp
                    whole[at[FLOW_LIST] + flows] = flow
                    flows += 1
    for i in range(flows):
        refresh_flow(whole[at[FLOW_LIST] + i], whole, at)
    for i in range(lanes):
        refresh_lane(whole[at[LANE_LIST] + i], whole, real, at)


def largest(whole: Any, at: Any) -> int:
    """The estimate: the largest value of a cut. Remembers which one."""
    best = whole[at[VALUE]]
    at[LEADING] = 0
    for cut in range(1, at[USED]):
        if whole[at[VALUE] + cut] > best:
            best = whole[at[VALUE] + cut]
            at[LEADING] = cut
    return int(best)


def recompute(whole: Any, real: Any, at: Any) -> int:
    """Everything from the devices at the slots alone; the estimate in ticks."""
    for slot in range(at[DEVICES]):
        whole[at[SLOT_OF] + whole[at[DEVICE] + slot]] = slot
    for message in range(at[MESSAGES]):
        read_message(message, whole, at)
    for cut in range(at[USED]):
        whole[at[VALUE] + cut] = whole[at[CONSTANT] + cut]
    for entry in range(at[ENTRIES]):
        whole[at[X] + entry] = 0
    at[UNDO] = 0
    for flow in range(at[FLOWS]):
        refresh_flow(flow, whole, at)
        at[UNDO] = 0
    for lane in range(at[LANE_COUNT]):
        refresh_lane(lane, whole, real, at)
        at[UNDO] = 0
    return largest(whole, at)
