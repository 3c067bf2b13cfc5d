"""Rings of a lane and ports that messages share: inner loops of the placement search, see `transfer_times`."""

from __future__ import annotations

from typing import Any

from pipefit.plan.placement.kernels.tables import (
    HostLinks,
    PlanTable,
    SearchState,
)
from pipefit.plan.placement.links import TICK_S


def add_load(a: int, b: int, amount: Any, load: Any, links: HostLinks) -> Any:
    """Add to the ports occupied by a message from device `a` to device `b`; return the larger of their loads.

    `load` has an entry for each port: [device] inside its host, [device] of its own between
    hosts, [host, rail] out, [host, rail] in.
    """
    from_host, to_host = links.host[a], links.host[b]
    if from_host == to_host:
        load[a] += amount
        return load[a]
    rail = links.rail[a]
    if links.shared[rail] == 0:
        load[links.devices + a] += amount
        return load[links.devices + a]
    ports = 2 * links.devices + rail
    out, into = ports + from_host * links.rails, ports + (links.hosts + to_host) * links.rails
    load[out] += amount
    load[into] += amount
    return max(load[out], load[into])


def clear_load(a: int, b: int, load: Any, links: HostLinks) -> None:
    """Set the loads changed by `add_load` to zero."""
    load[a] = 0
    load[links.devices + a] = 0
    ports = 2 * links.devices + links.rail[a]
    load[ports + links.host[a] * links.rails] = 0
    load[ports + (links.hosts + links.host[b]) * links.rails] = 0


def ring_device(lane: int, shard: int, i: int, plan: PlanTable, state: SearchState) -> int:
    """Return the i-th device of a lane's ring, in ascending order."""
    return int(state.device[state.order[(lane * plan.shards + shard) * plan.replicas + i]])


def sort_rings(lane: int, plan: PlanTable, state: SearchState) -> None:
    """Sort the lane's slots by their devices. They are usually almost sorted from the last time."""
    devices, order, replicas = state.device, state.order, plan.replicas
    for shard in range(plan.shards):
        first = (lane * plan.shards + shard) * replicas
        largest = devices[order[first]]
        for i in range(first + 1, first + replicas):
            slot = order[i]
            device = devices[slot]
            if device > largest:
                largest = device
                continue
            j = i - 1
            while j >= first and devices[order[j]] > device:
                order[j + 1] = order[j]
                j -= 1
            order[j + 1] = slot


def single_hops(lane: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Compute `ring_hops` if every host has one device: all hops go between hosts and share no port."""
    largest, latency = 0.0, 0
    devices, order, replicas = state.device, state.order, plan.replicas
    for shard in range(plan.shards):
        first = (lane * plan.shards + shard) * replicas
        a = devices[order[first + replicas - 1]]
        for i in range(first, first + replicas):
            b = devices[order[i]]
            link = links.hop[a] + links.host[b]
            largest, latency = max(largest, links.per_byte[link]), max(latency, links.latency[link])
            a = b
    state.ring[1] = latency
    state.ring[2] = largest


def ring_hops(lane: int, step: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Compute latency and load of the rings through every `step`-th device of the lane's sorted rings; 1 is the flat
    ring.

    Fills the values 1 and 2 for step 1, else 8 and 9.
    """
    largest, latency = 0.0, 0
    replicas = plan.replicas
    for shard in range(plan.shards):
        first = (lane * plan.shards + shard) * replicas
        for i in range(replicas):
            after = i + step if i + step < replicas else i + step - replicas
            a, b = state.device[state.order[first + i]], state.device[state.order[first + after]]
            from_host, to_host = links.host[a], links.host[b]
            if from_host == to_host:
                wait, per_byte = links.inside_latency[from_host], links.inside_per_byte[from_host]
            else:
                link = links.hop[a] + to_host
                wait, per_byte = links.latency[link], links.per_byte[link]
            per_byte = add_load(a, b, per_byte, state.load_per_byte, links)
            largest, latency = max(largest, per_byte), max(latency, wait)
    for shard in range(plan.shards):
        for i in range(replicas):
            a = ring_device(lane, shard, i, plan, state)
            b = ring_device(lane, shard, (i + step) % replicas, plan, state)
            clear_load(a, b, state.load_per_byte, links)
    fact = 1 if step == 1 else 8
    state.ring[fact] = latency
    state.ring[fact + 1] = largest


def ring_levels(lane: int, links: HostLinks, plan: PlanTable, state: SearchState) -> int:
    """Return the devices of each ring on each of its hosts, if that number is constant, above 1, with several hosts;
    else 0.

    Fills the values 5 and 6: the rings inside the hosts (`cost.collectives`).
    """
    per_host = 0
    latency, per_byte = 0, 0.0
    for shard in range(plan.shards):
        run = 0
        for i in range(plan.replicas):
            host = links.host[ring_device(lane, shard, i, plan, state)]
            run += 1
            last = i + 1 == plan.replicas
            if last or links.host[ring_device(lane, shard, i + 1, plan, state)] != host:
                if per_host == 0:
                    per_host = run
                if run != per_host or run == 1 or run == plan.replicas:
                    return 0
                run = 0
                latency = max(latency, links.inside_latency[host])
                per_byte = max(per_byte, links.inside_per_byte[host])
    state.ring[5] = latency
    state.ring[6] = per_byte
    return per_host


def ring_facts(lane: int, links: HostLinks, plan: PlanTable, state: SearchState) -> None:
    """Fill the values of a lane's rings.

    0 hops, 1 latency, 2 seconds per byte of the flat rings; 3 devices on each host or 0; if not 0, then 4 hops, 5
    latency, 6 seconds per byte inside the hosts, and 7, 8, 9 the same between them.
    """
    sort_rings(lane, plan, state)
    per_host = 0
    if links.single == 1:
        single_hops(lane, links, plan, state)
    else:
        ring_hops(lane, 1, links, plan, state)
        per_host = ring_levels(lane, links, plan, state)
    state.ring[0] = plan.replicas
    state.ring[3] = per_host
    if per_host > 0:
        ring_hops(lane, per_host, links, plan, state)
        state.ring[4] = per_host
        state.ring[7] = plan.replicas // per_host


def pass_ticks(first: int, total_bytes: float, latency_factor: float, byte_factor: float, state: SearchState) -> float:
    """Return the ticks of one pass of rings whose values begin at `first`: `cost.network.RingTime.pass_s`."""
    hops = state.ring[first]
    if hops <= 1:
        return 0.0
    seconds = total_bytes / hops * state.ring[first + 2] * byte_factor
    return float((hops - 1) * (state.ring[first + 1] * latency_factor + seconds / TICK_S))


def term_ticks(term: int, plan: PlanTable, state: SearchState) -> int:
    """Return the exposed ticks of a collective, given the values of its lane's rings: `cost.collectives`,
    `cost.overlap`."""
    total_bytes = plan.bytes[term]
    latency_factor, byte_factor = plan.latency_factor[term], plan.byte_factor[term]
    pass_time = pass_ticks(0, total_bytes, latency_factor, byte_factor, state)
    per_host = state.ring[3]
    if per_host > 0:
        across = pass_ticks(7, total_bytes / per_host, latency_factor, byte_factor, state)
        pass_time = min(pass_time, across + pass_ticks(4, total_bytes, latency_factor, byte_factor, state))
    once = plan.passes[term] * pass_time + plan.more[term]
    left = 0.0
    for line in range(plan.line_start[term], plan.line_start[term + 1]):
        left = max(left, plan.line_share[line] * once - plan.line_beside[line])
    return int(once - plan.share[term] * (once - left) + 0.5)
