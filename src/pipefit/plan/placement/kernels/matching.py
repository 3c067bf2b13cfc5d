"""Exact pairing of senders and receivers between neighbouring lanes: inner loops of the search over sets, see `sets`.

If every message goes from a device to that of the same pipeline on a neighbouring lane, pipelines can be chosen
boundary by boundary without changing any ring: the pairs of a boundary are a perfect matching of two sets of devices,
and its cost is the slowest pair. The bottleneck matching is updated along alternating paths with the smallest largest
pair, as Dijkstra's rule finds them (Burkard, Dell'Amico and Martello 2009, chapter 6).
"""

from __future__ import annotations

from pipefit.plan.placement.kernels.tables import (
    KEPT_EDGES,
    ChainTable,
    HostLinks,
    PlanTable,
    SearchState,
)
from pipefit.plan.placement.kernels.transfer_times import note_entry


def pair_ticks(
    edge: int, left: int, right: int, links: HostLinks, plan: PlanTable, state: SearchState, chain: ChainTable
) -> int:
    """Return the summed ticks of the messages between two positions of the lanes at a boundary."""
    first, devices = edge * plan.replicas, links.devices
    a, b = state.device[first + left], state.device[first + plan.replicas + right]
    return int(chain.pair[(chain.pair_of[edge] * devices + a) * devices + b])


def keep_pairs(edge: int, plan: PlanTable, state: SearchState, chain: ChainTable) -> None:
    """Save the pairs of a boundary before they change, once per move, for `restore_pairs`."""
    for i in range(state.counters[KEPT_EDGES]):
        if chain.kept_edge[i] == edge:
            return
    replicas = plan.replicas
    chain.kept_edge[state.counters[KEPT_EDGES]] = edge
    saved, first = state.counters[KEPT_EDGES] * replicas, edge * replicas
    for i in range(replicas):
        chain.kept_pairs[saved + i] = chain.partner[first + i]
    state.counters[KEPT_EDGES] += 1


def restore_pairs(plan: PlanTable, state: SearchState, chain: ChainTable) -> None:
    """Restore the saved pairs."""
    replicas = plan.replicas
    for saved in range(state.counters[KEPT_EDGES]):
        first = chain.kept_edge[saved] * replicas
        for i in range(replicas):
            partner = chain.kept_pairs[saved * replicas + i]
            chain.partner[first + i] = partner
            chain.back[first + partner] = i


def augment_path(
    edge: int, left: int, right: int, links: HostLinks, plan: PlanTable, state: SearchState, chain: ChainTable
) -> int:
    """Separate the pair (`left`, `right`) of a boundary and join both along the alternating path with the smallest
    largest pair.

    Returns that pair's ticks; returns -1 and changes nothing if they are not below those of the separated pair.
    """
    replicas, limit = plan.replicas, pair_ticks(edge, left, right, links, plan, state, chain)
    lefts = edge * replicas
    rights = lefts + replicas
    device, distance, parent, ahead = state.device, chain.distance, chain.parent, chain.ahead
    pairs = chain.pair_of[edge] * links.devices * links.devices
    for i in range(replicas):
        distance[i] = limit
        ahead[i] = i
    current, largest, count = left, 0, replicas
    while True:
        row = pairs + device[lefts + current] * links.devices
        nearest, nearest_right, least = -1, -1, limit
        for k in range(count):
            i = ahead[k]
            reach = max(largest, chain.pair[row + device[rights + i]])
            if reach < distance[i]:
                distance[i] = reach
                parent[i] = current
            else:
                reach = distance[i]
            if reach < least:
                nearest, nearest_right, least = k, i, reach
        if nearest < 0:
            return -1
        largest = least
        if nearest_right == right:
            break
        count -= 1
        ahead[nearest] = ahead[count]
        current = chain.back[lefts + nearest_right]
    keep_pairs(edge, plan, state, chain)
    end = right
    while True:
        start = parent[end]
        before = chain.partner[lefts + start]
        chain.partner[lefts + start] = end
        chain.back[lefts + end] = start
        if start == left:
            return int(largest)
        end = before


def slowest_pair(edge: int, links: HostLinks, plan: PlanTable, state: SearchState, chain: ChainTable) -> int:
    """Return the left position of a boundary's slowest pair."""
    replicas = plan.replicas
    device, lefts = state.device, edge * replicas
    pairs = chain.pair_of[edge] * links.devices * links.devices
    slowest, largest = 0, -1
    for i in range(replicas):
        a, b = device[lefts + i], device[lefts + replicas + chain.partner[lefts + i]]
        ticks = chain.pair[pairs + a * links.devices + b]
        if ticks > largest:
            slowest, largest = i, ticks
    return slowest


def rematch_edge(edge: int, links: HostLinks, plan: PlanTable, state: SearchState, chain: ChainTable) -> None:
    """Minimise the slowest pair of a boundary's matching.

    The slowest pair is separated until no path below it joins its ends again; then no faster matching exists. The same
    holds if the largest pair of the last path is the slowest now.
    """
    first = edge * plan.replicas
    left = slowest_pair(edge, links, plan, state, chain)
    while True:
        right = chain.partner[first + left]
        reached = augment_path(edge, left, right, links, plan, state, chain)
        if reached < 0:
            return
        left = slowest_pair(edge, links, plan, state, chain)
        if pair_ticks(edge, left, chain.partner[first + left], links, plan, state, chain) == reached:
            return


def note_edge(edge: int, links: HostLinks, plan: PlanTable, state: SearchState, chain: ChainTable) -> None:
    """Note the times of a boundary's flows, as `transfer_times.refresh_flow` does. Hosts have one device each here."""
    replicas = plan.replicas
    device, lefts = state.device, edge * replicas
    for entry in range(chain.edge_start[edge], chain.edge_start[edge + 1]):
        flow = chain.edge_flows[entry]
        size = plan.size[plan.flow_start[flow]]
        forward = chain.forward[flow]
        port, latency = 0, 0
        for i in range(replicas):
            a, b = device[lefts + i], device[lefts + replicas + chain.partner[lefts + i]]
            if forward == 0:
                a, b = b, a
            link = links.hop[a] + links.host[b]
            port, latency = max(port, links.busy[size, link]), max(latency, links.latency[link])
        note_entry(flow, port + latency, state)
        note_entry(plan.flows + flow, port, state)
