"""Who sends to whom between neighbouring lanes, found exactly: inner loops of the search over sets, see `sets`.

Where every message goes from a device to the one of the same pipeline on a neighbouring lane, which pipeline that is
may be chosen boundary by boundary, without a change to any ring: the pairs of a boundary are a perfect matching of two
sets of devices, and what counts is the slowest of them. The bottleneck matching is kept up by alternating paths with
the least largest pair, as Dijkstra's rule finds them (Burkard, Dell'Amico and Martello 2009, chapter 6).
"""

from __future__ import annotations

from typing import Any

from pipefit.plan.placement.arena import (
    BACK,
    DEVICE,
    DEVICES,
    DISTANCE,
    EDGE_FLOWS,
    EDGE_START,
    FINISHED,
    FLOW_START,
    FLOWS,
    FORWARD,
    PAIR,
    PAIR_OF,
    PARENT,
    PARTNER,
    REPLICAS,
    SIZE,
)
from pipefit.plan.placement.kernel import link_ticks, note_x

BEYOND = 1 << 60
"""More ticks than any pair takes."""


def pair_ticks(edge: int, left: int, right: int, whole: Any, at: Any) -> int:
    """What the messages between two places of the lanes at a boundary take together."""
    first, devices = at[DEVICE] + edge * at[REPLICAS], at[DEVICES]
    a, b = whole[first + left], whole[first + at[REPLICAS] + right]
    return int(whole[at[PAIR] + (whole[at[PAIR_OF] + edge] * devices + a) * devices + b])


def augment(edge: int, left: int, right: int, limit: int, whole: Any, at: Any) -> int:
    """Pair the free places `left` and `right` of a boundary along the alternating path whose largest pair is least;
    returns that pair's ticks, or -1 if they are not below `limit`, and changes nothing then."""
    replicas, devices = at[REPLICAS], at[DEVICES]
    lefts = at[DEVICE] + edge * replicas
    partner, back = at[PARTNER] + edge * replicas, at[BACK] + edge * replicas
    distance, parent, finished = at[DISTANCE], at[PARENT], at[FINISHED]
    pairs = at[PAIR] + whole[at[PAIR_OF] + edge] * devices * devices
    row = pairs + whole[lefts + left] * devices
    for i in range(replicas):
        whole[distance + i] = whole[row + whole[lefts + replicas + i]]
        whole[parent + i] = left
        whole[finished + i] = 0
    while True:
        nearest, most = -1, limit
        for i in range(replicas):
            if whole[finished + i] == 0 and whole[distance + i] < most:
                nearest, most = i, whole[distance + i]
        if nearest < 0:
            return -1
        if nearest == right:
            break
        whole[finished + nearest] = 1
        other = whole[back + nearest]
        row = pairs + whole[lefts + other] * devices
        for i in range(replicas):
            if whole[finished + i] == 0 and whole[distance + i] > most:
                own = max(most, whole[row + whole[lefts + replicas + i]])
                if own < whole[distance + i]:
                    whole[distance + i] = own
                    whole[parent + i] = other
    end = right
    while True:
        start = whole[parent + end]
        before = whole[partner + start]
        whole[partner + start] = end
        whole[back + end] = start
        if start == left:
            return int(whole[distance + right])
        end = before


def slowest_pair(edge: int, whole: Any, at: Any) -> int:
    """The place on the left of a boundary's slowest pair."""
    slowest, most = 0, -1
    for i in range(at[REPLICAS]):
        own = pair_ticks(edge, i, whole[at[PARTNER] + edge * at[REPLICAS] + i], whole, at)
        if own > most:
            slowest, most = i, own
    return slowest


def rematch(edge: int, whole: Any, at: Any) -> None:
    """Bring a boundary's matching to the least slowest pair: that pair is parted until no path below it joins its ends
    again, and then no matching below it is left."""
    partner = at[PARTNER] + edge * at[REPLICAS]
    while True:
        left = slowest_pair(edge, whole, at)
        right = whole[partner + left]
        if augment(edge, left, right, pair_ticks(edge, left, right, whole, at), whole, at) < 0:
            return


def rematch_one(edge: int, left: int, whole: Any, at: Any) -> None:
    """The same after one device has changed, of the pair of place `left`."""
    augment(edge, left, whole[at[PARTNER] + edge * at[REPLICAS] + left], BEYOND, whole, at)
    rematch(edge, whole, at)


def note_edge(edge: int, whole: Any, at: Any) -> None:
    """Note the times of a boundary's flows, as `kernel.refresh_flow` does."""
    lefts = at[DEVICE] + edge * at[REPLICAS]
    for entry in range(whole[at[EDGE_START] + edge], whole[at[EDGE_START] + edge + 1]):
        flow = whole[at[EDGE_FLOWS] + entry]
        size = whole[at[SIZE] + whole[at[FLOW_START] + flow]]
        port, latency = 0, 0
        for i in range(at[REPLICAS]):
            a = whole[lefts + i]
            b = whole[lefts + at[REPLICAS] + whole[at[PARTNER] + edge * at[REPLICAS] + i]]
            if whole[at[FORWARD] + flow] == 0:
                a, b = b, a
            busy, wait = link_ticks(a, b, size, whole, at)
            port, latency = max(port, busy), max(latency, wait)
        note_x(flow, port + latency, whole, at)
        note_x(at[FLOWS] + flow, port, whole, at)
