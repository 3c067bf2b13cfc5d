"""Simulated annealing over the sets of devices of the lanes, with their pipelines matched exactly (`matching`).

For chains of lanes whose devices are alone on their hosts (`chains`). The set of devices of a lane determines its ring;
the pipelines only affect the transfers of each boundary. So a move swaps two devices of different lanes, or all devices
of two lanes, and then rematches the pairs of every boundary it touches. One such move is worth many of `anneal`, which
finds the pairs by chance. Between two calls the state is a placement like any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipefit.plan.placement.kernels.anneal import draw_integer, heaviest_entry, slow_hop
from pipefit.plan.placement.kernels.arena import (
    BACK,
    CHANGES,
    CUT_ROOM,
    DEVICE,
    DEVICES,
    EDGE_FLOWS,
    EDGE_OF,
    EDGE_START,
    FLOWS,
    KEPT_EDGES,
    LANE_COUNT,
    LAYOUT,
    LEADING,
    PARTNER,
    REPLICAS,
    SLOTS,
    TOUCHED,
    TOUCHED_EDGE,
    VALUE,
    WEIGHT,
    X,
)
from pipefit.plan.placement.kernels.matching import note_edge, rematch_edge, restore_pairs, slowest_pair
from pipefit.plan.placement.kernels.transfer_times import commit, recompute, refresh_lane, value_of, would_be

LANE_SWAPS = 10
"""Number of 1,000 moves that swap all devices of two lanes."""

GAIN = 4
"""A move is rejected before rematching if its boundaries would have to gain more than 1 / GAIN."""


def slow_place(random: Any, whole: Any, real: Any, at: Any) -> int:
    """Return a slot with much weight now, chosen as in `anneal.slow_slot`."""
    flows, best = at[FLOWS], heaviest_entry(random, whole, at)
    if best < 0:
        return draw_integer(random, at[SLOTS])
    if best < 2 * flows:
        edge = whole[at[EDGE_OF] + best % flows]
        left = slowest_pair(edge, whole, at)
        if draw_integer(random, 2) == 0:
            return int(edge * at[REPLICAS] + left)
        return int((edge + 1) * at[REPLICAS] + whole[at[PARTNER] + edge * at[REPLICAS] + left])
    return slow_hop(best - 2 * flows, random, whole, real, at)


def swap_slots(one: int, other: int, count: int, whole: Any, at: Any) -> None:
    """Swap `count` devices from slot `one` on with the same number from slot `other` on."""
    for i in range(count):
        device = whole[at[DEVICE] + one + i]
        whole[at[DEVICE] + one + i] = whole[at[DEVICE] + other + i]
        whole[at[DEVICE] + other + i] = device


def edge_ticks(edge: int, whole: Any, at: Any) -> int:
    """Return the ticks of a boundary's transfers in the leading cut."""
    total = 0
    for i in range(whole[at[EDGE_START] + edge], whole[at[EDGE_START] + edge + 1]):
        flow = whole[at[EDGE_FLOWS] + i]
        for entry in (flow, at[FLOWS] + flow):
            total += whole[at[WEIGHT] + entry * at[CUT_ROOM] + at[LEADING]] * whole[at[X] + entry]
    return int(total)


def touched_edges(one: int, other: int, whole: Any, at: Any) -> int:
    """Write the boundaries of the lanes of two slots into `touched_edge`, each once; return their number."""
    count, before = 0, -9
    for slot in (one, other):
        if slot < at[SLOTS]:
            lane = slot // at[REPLICAS]
            for edge in (lane - 1, lane):
                if 0 <= edge < at[LANE_COUNT] - 1 and edge != before and edge != before - 1:
                    whole[at[TOUCHED_EDGE] + count] = edge
                    count += 1
            before = lane
    return count


def refresh_sets(one: int, other: int, limit: Any, whole: Any, real: Any, at: Any) -> None:
    """Note the changes of a swap of devices on the lanes of these slots.

    It stops early if the estimate cannot stay below `limit`, by the rings alone or by the boundaries so far; the noted
    changes then exceed the limit.
    """
    at[CHANGES], at[KEPT_EDGES], at[TOUCHED] = 0, 0, 0
    for slot in (one, other):
        if slot < at[SLOTS]:
            refresh_lane(slot // at[REPLICAS], whole, real, at)
    count, hope = touched_edges(one, other, whole, at), 0
    for i in range(count):
        hope += edge_ticks(whole[at[TOUCHED_EDGE] + i], whole, at)
    for i in range(count):
        if value_of(at[LEADING], whole, at) - hope // GAIN >= limit:
            return
        edge = whole[at[TOUCHED_EDGE] + i]
        rematch_edge(edge, whole, at)
        note_edge(edge, whole, at)
        hope -= edge_ticks(edge, whole, at)


def write_layout(whole: Any, at: Any) -> None:
    """Write the devices to `layout` pipeline by pipeline, by their pairs; those of idle slots stay."""
    replicas = at[REPLICAS]
    for slot in range(at[DEVICES]):
        whole[at[LAYOUT] + slot] = whole[at[DEVICE] + slot]
    for i in range(replicas):
        position = i
        for lane in range(1, at[LANE_COUNT]):
            position = whole[at[PARTNER] + (lane - 1) * replicas + position]
            whole[at[LAYOUT] + lane * replicas + i] = whole[at[DEVICE] + lane * replicas + position]


def match_all(whole: Any, at: Any) -> None:
    """Initialise the pairs from the placement, and optimise them."""
    replicas = at[REPLICAS]
    at[CHANGES], at[TOUCHED] = 0, 0
    for edge in range(at[LANE_COUNT] - 1):
        for i in range(replicas):
            whole[at[PARTNER] + edge * replicas + i] = i
            whole[at[BACK] + edge * replicas + i] = i
        at[KEPT_EDGES] = 0
        rematch_edge(edge, whole, at)
        note_edge(edge, whole, at)
    would_be(np.inf, whole, at)
    commit(whole, at)


def anneal_sets(
    count: int, control: Any, random: Any, exponential: Any, best_device: Any, whole: Any, real: Any, at: Any
) -> int:
    """Make `count` moves over sets, with the arguments of `anneal.anneal`."""
    match_all(whole, at)
    now = whole[at[VALUE] + at[LEADING]]
    temperature, factor = control[0], control[1]
    for _ in range(count):
        temperature *= factor
        if draw_integer(random, 1000) < LANE_SWAPS and at[LANE_COUNT] > 1:
            width = at[REPLICAS]
            left = draw_integer(random, at[LANE_COUNT])
            right = (left + 1 + draw_integer(random, at[LANE_COUNT] - 1)) % at[LANE_COUNT]
            left, right = left * width, right * width
        else:
            width = 1
            left = (
                slow_place(random, whole, real, at) if draw_integer(random, 2) == 0 else draw_integer(random, at[SLOTS])
            )
            first = left // at[REPLICAS] * at[REPLICAS]
            right = draw_integer(random, at[DEVICES] - at[REPLICAS])
            if right >= first:
                right += at[REPLICAS]
        limit = now + temperature * exponential[draw_integer(random, len(exponential))]
        swap_slots(left, right, width, whole, at)
        refresh_sets(left, right, limit, whole, real, at)
        new = would_be(limit, whole, at)
        if new < limit:
            commit(whole, at)
            now = new
            if new < control[2]:
                control[2] = new
                write_layout(whole, at)
                for slot in range(len(best_device)):
                    best_device[slot] = whole[at[LAYOUT] + slot]
        else:
            swap_slots(left, right, width, whole, at)
            restore_pairs(whole, at)
    control[0] = temperature
    write_layout(whole, at)
    for slot in range(at[DEVICES]):
        whole[at[DEVICE] + slot] = whole[at[LAYOUT] + slot]
    return recompute(whole, real, at)
