"""Rings of a lane and ports that messages share: inner loops of the placement search, see `transfer_times`."""

from __future__ import annotations

from typing import Any

from pipefit.plan.placement.kernels.arena import (
    BYTE_FACTOR,
    BYTES,
    DEVICE,
    DEVICES,
    HOP,
    HOST,
    HOSTS,
    INSIDE_LATENCY,
    INSIDE_PER_BYTE,
    LATENCY,
    LATENCY_FACTOR,
    LINE_BESIDE,
    LINE_SHARE,
    LINE_START,
    LOAD_PER_BYTE,
    MATRIX,
    MORE,
    ORDER,
    PASSES,
    PER_BYTE,
    RAIL,
    RAILS,
    REPLICAS,
    RING,
    SHARDS,
    SHARE,
    SHARED,
    SINGLE,
)
from pipefit.plan.placement.links import TICK_S


def add_load(a: int, b: int, amount: Any, load: Any, base: int, whole: Any, at: Any) -> Any:
    """Add to the ports occupied by a message from device `a` to device `b`; return the larger of their loads.

    The loads are in the arena array `load` from `base` on. Ports: [device] inside its host, [device] of its own between
    hosts, [host, rail] out, [host, rail] in.
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
    """Set the loads changed by `add_load` to zero."""
    load[base + a] = 0
    load[base + at[DEVICES] + a] = 0
    ports = base + 2 * at[DEVICES] + whole[at[RAIL] + a]
    load[ports + whole[at[HOST] + a] * at[RAILS]] = 0
    load[ports + (at[HOSTS] + whole[at[HOST] + b]) * at[RAILS]] = 0


def ring_device(lane: int, shard: int, i: int, whole: Any, at: Any) -> int:
    """Return the i-th device of a lane's ring, in ascending order."""
    return int(whole[at[DEVICE] + whole[at[ORDER] + (lane * at[SHARDS] + shard) * at[REPLICAS] + i]])


def sort_rings(lane: int, whole: Any, at: Any) -> None:
    """Sort the lane's slots by their devices. They are usually almost sorted from the last time."""
    devices, replicas = at[DEVICE], at[REPLICAS]
    for shard in range(at[SHARDS]):
        first = at[ORDER] + (lane * at[SHARDS] + shard) * replicas
        largest = whole[devices + whole[first]]
        for i in range(first + 1, first + replicas):
            slot = whole[i]
            device = whole[devices + slot]
            if device > largest:
                largest = device
                continue
            j = i - 1
            while j >= first and whole[devices + whole[j]] > device:
                whole[j + 1] = whole[j]
                j -= 1
            whole[j + 1] = slot


def single_hops(lane: int, whole: Any, real: Any, at: Any) -> None:
    """Compute `ring_hops` if every host has one device: all hops go between hosts and share no port."""
    largest, latency = 0.0, 0
    devices, hop, host, replicas = at[DEVICE], at[HOP], at[HOST], at[REPLICAS]
    waits, times = at[LATENCY], at[PER_BYTE]
    for shard in range(at[SHARDS]):
        first = at[ORDER] + (lane * at[SHARDS] + shard) * replicas
        a = whole[devices + whole[first + replicas - 1]]
        for i in range(first, first + replicas):
            b = whole[devices + whole[i]]
            link = whole[hop + a] + whole[host + b]
            largest, latency = max(largest, real[times + link]), max(latency, whole[waits + link])
            a = b
    real[at[RING] + 1] = latency
    real[at[RING] + 2] = largest


def ring_hops(lane: int, step: int, whole: Any, real: Any, at: Any) -> None:
    """Compute latency and load of the rings through every `step`-th device of the lane's sorted rings; 1 is the flat
    ring.

    Fills the values 1 and 2 for step 1, else 8 and 9.
    """
    largest, latency = 0.0, 0
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
            per_byte = add_load(a, b, per_byte, real, at[LOAD_PER_BYTE], whole, at)
            largest, latency = max(largest, per_byte), max(latency, wait)
    for shard in range(at[SHARDS]):
        for i in range(replicas):
            a = ring_device(lane, shard, i, whole, at)
            b = ring_device(lane, shard, (i + step) % replicas, whole, at)
            clear_load(a, b, real, at[LOAD_PER_BYTE], whole, at)
    fact = at[RING] + (1 if step == 1 else 8)
    real[fact] = latency
    real[fact + 1] = largest


def ring_levels(lane: int, whole: Any, real: Any, at: Any) -> int:
    """Return the devices of each ring on each of its hosts, if that number is constant, above 1, with several hosts;
    else 0.

    Fills the values 5 and 6: the rings inside the hosts (`cost.collectives`).
    """
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
    """Fill the values of a lane's rings.

    0 hops, 1 latency, 2 seconds per byte of the flat rings; 3 devices on each host or 0; if not 0, then 4 hops, 5
    latency, 6 seconds per byte inside the hosts, and 7, 8, 9 the same between them.
    """
    sort_rings(lane, whole, at)
    per_host = 0
    if at[SINGLE] == 1:
        single_hops(lane, whole, real, at)
    else:
        ring_hops(lane, 1, whole, real, at)
        per_host = ring_levels(lane, whole, real, at)
    real[at[RING]] = at[REPLICAS]
    real[at[RING] + 3] = per_host
    if per_host > 0:
        ring_hops(lane, per_host, whole, real, at)
        real[at[RING] + 4] = per_host
        real[at[RING] + 7] = at[REPLICAS] // per_host


def pass_ticks(first: int, total_bytes: float, latency_factor: float, byte_factor: float, real: Any, at: Any) -> float:
    """Return the ticks of one pass of rings whose values begin at `first`: `cost.network.RingTime.pass_s`."""
    facts = at[RING] + first
    hops = real[facts]
    if hops <= 1:
        return 0.0
    seconds = total_bytes / hops * real[facts + 2] * byte_factor
    return float((hops - 1) * (real[facts + 1] * latency_factor + seconds / TICK_S))


def term_ticks(term: int, whole: Any, real: Any, at: Any) -> int:
    """Return the exposed ticks of a collective, given the values of its lane's rings: `cost.collectives`,
    `cost.overlap`."""
    total_bytes = real[at[BYTES] + term]
    latency_factor, byte_factor = real[at[LATENCY_FACTOR] + term], real[at[BYTE_FACTOR] + term]
    pass_time = pass_ticks(0, total_bytes, latency_factor, byte_factor, real, at)
    per_host = real[at[RING] + 3]
    if per_host > 0:
        across = pass_ticks(7, total_bytes / per_host, latency_factor, byte_factor, real, at)
        pass_time = min(pass_time, across + pass_ticks(4, total_bytes, latency_factor, byte_factor, real, at))
    once = whole[at[PASSES] + term] * pass_time + whole[at[MORE] + term]
    left = 0.0
    for line in range(whole[at[LINE_START] + term], whole[at[LINE_START] + term + 1]):
        left = max(left, real[at[LINE_SHARE] + line] * once - real[at[LINE_BESIDE] + line])
    return int(once - real[at[SHARE] + term] * (once - left) + 0.5)
