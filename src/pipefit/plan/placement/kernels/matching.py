"""Exact pairing of senders and receivers between neighbouring lanes: inner loops of the search over sets, see `sets`.

If every message goes from a device to that of the same pipeline on a neighbouring lane, pipelines can be chosen
boundary by boundary without changing any ring: the pairs of a boundary are a perfect matching of two sets of devices,
and its cost is the slowest pair. The bottleneck matching is updated along alternating paths with the smallest largest
pair, as Dijkstra's rule finds them (Burkard, Dell'Amico and Martello 2009, chapter 6).
"""

from __future__ import annotations

from typing import Any

from pipefit.plan.placement.kernels.arena import (
    AHEAD,
    BACK,
    BUSY,
    DEVICE,
    DEVICES,
    DISTANCE,
    EDGE_FLOWS,
    EDGE_START,
    FLOW_START,
    FLOWS,
    FORWARD,
    HOP,
    HOST,
    HOSTS,
    KEPT_EDGE,
    KEPT_EDGES,
    KEPT_PAIRS,
    LATENCY,
    MATRICES,
    PAIR,
    PAIR_OF,
    PARENT,
    PARTNER,
    REPLICAS,
    SIZE,
)
from pipefit.plan.placement.kernels.transfer_times import note_entry

BEYOND = 1 << 60
"""More ticks than any pair takes."""


def pair_ticks(edge: int, left: int, right: int, whole: Any, at: Any) -> int:
    """Return the summed ticks of the messages between two positions of the lanes at a boundary."""
    first, devices = at[DEVICE] + edge * at[REPLICAS], at[DEVICES]
    a, b = whole[first + left], whole[first + at[REPLICAS] + right]
    return int(whole[at[PAIR] + (whole[at[PAIR_OF] + edge] * devices + a) * devices + b])


def keep_pairs(edge: int, whole: Any, at: Any) -> None:
    """Save the pairs of a boundary before they change, once per move, for `restore_pairs`."""
    for i in range(at[KEPT_EDGES]):
        if whole[at[KEPT_EDGE] + i] == edge:
            return
    replicas = at[REPLICAS]
    whole[at[KEPT_EDGE] + at[KEPT_EDGES]] = edge
    saved, partner = at[KEPT_PAIRS] + at[KEPT_EDGES] * replicas, at[PARTNER] + edge * replicas
    for i in range(replicas):
        whole[saved + i] = whole[partner + i]
    at[KEPT_EDGES] += 1


def restore_pairs(whole: Any, at: Any) -> None:
    """Restore the saved pairs."""
    replicas = at[REPLICAS]
    for saved in range(at[KEPT_EDGES]):
        first = whole[at[KEPT_EDGE] + saved] * replicas
        for i in range(replicas):
            partner = whole[at[KEPT_PAIRS] + saved * replicas + i]
            whole[at[PARTNER] + first + i] = partner
            whole[at[BACK] + first + partner] = i


def augment_path(edge: int, left: int, right: int, limit: int, whole: Any, at: Any) -> int:
    """Separate the pair (`left`, `right`) of a boundary and join both along the alternating path with the smallest
    largest pair.

    Returns that pair's ticks; returns -1 and changes nothing if they are not below `limit`.
    """
    replicas = at[REPLICAS]
    lefts = at[DEVICE] + edge * replicas
    rights = lefts + replicas
    partner, back = at[PARTNER] + edge * replicas, at[BACK] + edge * replicas
    distance, parent, ahead = at[DISTANCE], at[PARENT], at[AHEAD]
    pairs = at[PAIR] + whole[at[PAIR_OF] + edge] * at[DEVICES] * at[DEVICES]
    for i in range(replicas):
        whole[distance + i] = limit
        whole[ahead + i] = i
    current, largest, count = left, 0, replicas
    while True:
        row = pairs + whole[lefts + current] * at[DEVICES]
        nearest, nearest_right, least = -1, -1, limit
        for k in range(count):
            i = whole[ahead + k]
            reach = max(largest, whole[row + whole[rights + i]])
            if reach < whole[distance + i]:
                whole[distance + i] = reach
                whole[parent + i] = current
            else:
                reach = whole[distance + i]
            if reach < least:
                nearest, nearest_right, least = k, i, reach
        if nearest < 0:
            return -1
        largest = least
        if nearest_right == right:
            break
        count -= 1
        whole[ahead + nearest] = whole[ahead + count]
        current = whole[back + nearest_right]
    keep_pairs(edge, whole, at)
    end = right
    while True:
        start = whole[parent + end]
        before = whole[partner + start]
        whole[partner + start] = end
        whole[back + end] = start
        if start == left:
            return int(largest)
        end = before


def slowest_pair(edge: int, whole: Any, at: Any) -> int:
    """Return the left position of a boundary's slowest pair."""
    replicas = at[REPLICAS]
    lefts, partner = at[DEVICE] + edge * replicas, at[PARTNER] + edge * replicas
    pairs = at[PAIR] + whole[at[PAIR_OF] + edge] * at[DEVICES] * at[DEVICES]
    slowest, largest = 0, -1
    for i in range(replicas):
        ticks = whole[pairs + whole[lefts + i] * at[DEVICES] + whole[lefts + replicas + whole[partner + i]]]
        if ticks > largest:
            slowest, largest = i, ticks
    return slowest


def rematch_edge(edge: int, whole: Any, at: Any) -> None:
    """Minimise the slowest pair of a boundary's matching.

    The slowest pair is separated until no path below it joins its ends again; then no faster matching exists. The same
    holds if the largest pair of the last path is the slowest now.
    """
    partner = at[PARTNER] + edge * at[REPLICAS]
    left = slowest_pair(edge, whole, at)
    while True:
        right = whole[partner + left]
        reached = augment_path(edge, left, right, pair_ticks(edge, left, right, whole, at), whole, at)
        if reached < 0:
            return
        left = slowest_pair(edge, whole, at)
        if pair_ticks(edge, left, whole[partner + left], whole, at) == reached:
            return


def note_edge(edge: int, whole: Any, at: Any) -> None:
    """Note the times of a boundary's flows, as `transfer_times.refresh_flow` does. Hosts have one device each here."""
    replicas, hosts = at[REPLICAS], at[HOSTS]
    lefts, partner = at[DEVICE] + edge * replicas, at[PARTNER] + edge * replicas
    for entry in range(whole[at[EDGE_START] + edge], whole[at[EDGE_START] + edge + 1]):
        flow = whole[at[EDGE_FLOWS] + entry]
        busy = at[BUSY] + whole[at[SIZE] + whole[at[FLOW_START] + flow]] * at[MATRICES] * hosts * hosts
        forward = whole[at[FORWARD] + flow]
        port, latency = 0, 0
        for i in range(replicas):
            a, b = whole[lefts + i], whole[lefts + replicas + whole[partner + i]]
            if forward == 0:
                a, b = b, a
            link = whole[at[HOP] + a] + whole[at[HOST] + b]
            port, latency = max(port, whole[busy + link]), max(latency, whole[at[LATENCY] + link])
        note_entry(flow, port + latency, whole, at)
        note_entry(at[FLOWS] + flow, port, whole, at)
