"""Simulated annealing over the sets of devices of the lanes, their pipelines always matched exactly (`matching`).

For chains of lanes whose devices stand alone on their hosts (`chains`). Which devices are on a lane decides its ring;
which of them form a pipeline decides only the transfers of each boundary. So a move exchanges two devices of different
lanes, or all of two lanes, and the pairs of every boundary that it touches follow: one such move is worth many of
`anneal`, which must find the pairs by chance. Between two calls the state is a placement like any other.
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
"""Of 1,000 moves, those that exchange all devices of two lanes."""

GAIN = 4
"""A move is given up before its pairs are looked for if they would have to gain more than one part in so many."""


def slow_place(random: Any, whole: Any, real: Any, at: Any) -> int:
    """A slot of something that counts much now, as `anneal.slow_slot` chooses it."""
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
    """`count` devices from slot `one` on and as many from slot `other` on change places."""
    for i in range(count):
        device = whole[at[DEVICE] + one + i]
        whole[at[DEVICE] + one + i] = whole[at[DEVICE] + other + i]
        whole[at[DEVICE] + other + i] = device


def edge_ticks(edge: int, whole: Any, at: Any) -> int:
    """What the transfers of a boundary take of the leading cut."""
    total = 0
    for i in range(whole[at[EDGE_START] + edge], whole[at[EDGE_START] + edge + 1]):
        flow = whole[at[EDGE_FLOWS] + i]
        for entry in (flow, at[FLOWS] + flow):
            total += whole[at[WEIGHT] + entry * at[CUT_ROOM] + at[LEADING]] * whole[at[X] + entry]
    return int(total)


def touched_edges(one: int, other: int, whole: Any, at: Any) -> int:
    """Write the boundaries of the lanes of two slots into `touched_edge`, each once; how many."""
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
    """Note what an exchange of devices on the lanes of these slots changes. Where it is hopeless that the estimate
    stays below `limit`, by the rings alone or by the boundaries so far, what is noted is that it does not."""
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
    """Write the devices to `layout` pipeline by pipeline, as the pairs say; those of idle slots stay."""
    replicas = at[REPLICAS]
    for slot in range(at[DEVICES]):
        whole[at[LAYOUT] + slot] = whole[at[DEVICE] + slot]
    for i in range(replicas):
        place = i
        for lane in range(1, at[LANE_COUNT]):
            place = whole[at[PARTNER] + (lane - 1) * replicas + place]
            whole[at[LAYOUT] + lane * replicas + i] = whole[at[DEVICE] + lane * replicas + place]


def match_all(whole: Any, at: Any) -> None:
    """Begin with the pairs of the placement, and make them the best ones."""
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
    """`count` moves, as `anneal.anneal` does them and with its arguments, over sets."""
    match_all(whole, at)
    now = whole[at[VALUE] + at[LEADING]]
    temperature, factor = control[0], control[1]
    for _ in range(count):
        temperature *= factor
        if draw_integer(random, 1000) < LANE_SWAPS and at[LANE_COUNT] > 1:
            width = at[REPLICAS]
            one = draw_integer(random, at[LANE_COUNT])
            other = (one + 1 + draw_integer(random, at[LANE_COUNT] - 1)) % at[LANE_COUNT]
            one, other = one * width, other * width
        else:
            width = 1
            one = (
                slow_place(random, whole, real, at) if draw_integer(random, 2) == 0 else draw_integer(random, at[SLOTS])
            )
            first = one // at[REPLICAS] * at[REPLICAS]
            other = draw_integer(random, at[DEVICES] - at[REPLICAS])
            if other >= first:
                other += at[REPLICAS]
        limit = now + temperature * exponential[draw_integer(random, len(exponential))]
        swap_slots(one, other, width, whole, at)
        refresh_sets(one, other, limit, whole, real, at)
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
            swap_slots(one, other, width, whole, at)
            restore_pairs(whole, at)
    control[0] = temperature
    write_layout(whole, at)
    for slot in range(at[DEVICES]):
        whole[at[DEVICE] + slot] = whole[at[LAYOUT] + slot]
    return recompute(whole, real, at)
