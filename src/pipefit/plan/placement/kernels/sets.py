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
from pipefit.plan.placement.kernels.matching import note_edge, rematch_edge, restore_pairs, slowest_pair
from pipefit.plan.placement.kernels.tables import (
    CHANGES,
    KEPT_EDGES,
    LEADING,
    TOUCHED,
    ChainTable,
    HostLinks,
    PlanTable,
    SearchState,
    SearchTables,
)
from pipefit.plan.placement.kernels.transfer_times import commit, recompute, refresh_lane, value_of, would_be

LANE_SWAPS = 10
"""Number of 1,000 moves that swap all devices of two lanes."""

GAIN = 4
"""A move is rejected before rematching if its boundaries would have to gain more than 1 / GAIN."""


def slow_place(random: Any, links: HostLinks, plan: PlanTable, state: SearchState, chain: ChainTable) -> int:
    """Return a slot with much weight now, chosen as in `anneal.slow_slot`."""
    flows, best = plan.flows, heaviest_entry(random, plan, state)
    if best < 0:
        return draw_integer(random, plan.slots)
    if best < 2 * flows:
        edge = chain.edge_of[best % flows]
        left = slowest_pair(edge, links, plan, state, chain)
        if draw_integer(random, 2) == 0:
            return int(edge * plan.replicas + left)
        return int((edge + 1) * plan.replicas + chain.partner[edge * plan.replicas + left])
    return slow_hop(best - 2 * flows, random, links, plan, state)


def swap_slots(one: int, other: int, count: int, state: SearchState) -> None:
    """Swap `count` devices from slot `one` on with the same number from slot `other` on."""
    for i in range(count):
        device = state.device[one + i]
        state.device[one + i] = state.device[other + i]
        state.device[other + i] = device


def edge_ticks(edge: int, plan: PlanTable, state: SearchState, chain: ChainTable) -> int:
    """Return the ticks of a boundary's transfers in the leading cut."""
    total = 0
    for i in range(chain.edge_start[edge], chain.edge_start[edge + 1]):
        flow = chain.edge_flows[i]
        for entry in (flow, plan.flows + flow):
            total += state.weight[entry, state.counters[LEADING]] * state.x[entry]
    return int(total)


def touched_edges(one: int, other: int, plan: PlanTable, chain: ChainTable) -> int:
    """Write the boundaries of the lanes of two slots into `touched_edge`, each once; return their number."""
    count, before = 0, -9
    for slot in (one, other):
        if slot < plan.slots:
            lane = slot // plan.replicas
            for edge in (lane - 1, lane):
                if 0 <= edge < plan.lanes - 1 and edge != before and edge != before - 1:
                    chain.touched_edge[count] = edge
                    count += 1
            before = lane
    return count


def refresh_sets(
    one: int, other: int, limit: Any, links: HostLinks, plan: PlanTable, state: SearchState, chain: ChainTable
) -> None:
    """Note the changes of a swap of devices on the lanes of these slots.

    It stops early if the estimate cannot stay below `limit`, by the rings alone or by the boundaries so far; the noted
    changes then exceed the limit.
    """
    state.counters[CHANGES], state.counters[KEPT_EDGES], state.counters[TOUCHED] = 0, 0, 0
    for slot in (one, other):
        if slot < plan.slots:
            refresh_lane(slot // plan.replicas, links, plan, state)
    count, edges_ticks = touched_edges(one, other, plan, chain), 0
    for i in range(count):
        edges_ticks += edge_ticks(chain.touched_edge[i], plan, state, chain)
    for i in range(count):
        if value_of(state.counters[LEADING], state) - edges_ticks // GAIN >= limit:
            return
        edge = chain.touched_edge[i]
        rematch_edge(edge, links, plan, state, chain)
        note_edge(edge, links, plan, state, chain)
        edges_ticks -= edge_ticks(edge, plan, state, chain)


def write_layout(links: HostLinks, plan: PlanTable, state: SearchState, chain: ChainTable) -> None:
    """Write the devices to `layout` pipeline by pipeline, by their pairs; those of idle slots stay."""
    replicas = plan.replicas
    for slot in range(links.devices):
        chain.layout[slot] = state.device[slot]
    for i in range(replicas):
        position = i
        for lane in range(1, plan.lanes):
            position = chain.partner[(lane - 1) * replicas + position]
            chain.layout[lane * replicas + i] = state.device[lane * replicas + position]


def match_all(links: HostLinks, plan: PlanTable, state: SearchState, chain: ChainTable) -> None:
    """Initialise the pairs from the placement, and optimise them."""
    replicas = plan.replicas
    state.counters[CHANGES], state.counters[TOUCHED] = 0, 0
    for edge in range(plan.lanes - 1):
        for i in range(replicas):
            chain.partner[edge * replicas + i] = i
            chain.back[edge * replicas + i] = i
        state.counters[KEPT_EDGES] = 0
        rematch_edge(edge, links, plan, state, chain)
        note_edge(edge, links, plan, state, chain)
    would_be(np.inf, state)
    commit(state)


def anneal_sets(count: int, control: Any, random: Any, exponential: Any, best_device: Any, tables: SearchTables) -> int:
    """Make `count` moves over sets, with the arguments of `anneal.anneal`."""
    links, plan, state, chain = tables.links, tables.plan, tables.state, tables.chain
    match_all(links, plan, state, chain)
    now = state.value[state.counters[LEADING]]
    temperature, factor = control[0], control[1]
    for _ in range(count):
        temperature *= factor
        if draw_integer(random, 1000) < LANE_SWAPS and plan.lanes > 1:
            width = plan.replicas
            left = draw_integer(random, plan.lanes)
            right = (left + 1 + draw_integer(random, plan.lanes - 1)) % plan.lanes
            left, right = left * width, right * width
        else:
            width = 1
            left = (
                slow_place(random, links, plan, state, chain)
                if draw_integer(random, 2) == 0
                else draw_integer(random, plan.slots)
            )
            first = left // plan.replicas * plan.replicas
            right = draw_integer(random, links.devices - plan.replicas)
            if right >= first:
                right += plan.replicas
        limit = now + temperature * exponential[draw_integer(random, len(exponential))]
        swap_slots(left, right, width, state)
        refresh_sets(left, right, limit, links, plan, state, chain)
        new = would_be(limit, state)
        if new < limit:
            commit(state)
            now = new
            if new < control[2]:
                control[2] = new
                write_layout(links, plan, state, chain)
                for slot in range(len(best_device)):
                    best_device[slot] = chain.layout[slot]
        else:
            swap_slots(left, right, width, state)
            restore_pairs(plan, state, chain)
    control[0] = temperature
    write_layout(links, plan, state, chain)
    for slot in range(links.devices):
        state.device[slot] = chain.layout[slot]
    return recompute(tables)
