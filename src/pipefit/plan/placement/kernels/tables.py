"""The arrays of a placement search in groups, the arguments of its compiled functions.

Numba compiles a named tuple as its fields, so a group costs nothing at run time. In the notes below, [a, b] is an array
with these axes, last one fastest; arrays with several axes are flat unless the note says otherwise.

Words: a `slot` is a position of the plan (lane, replica, shard; idle ones follow); a `message` goes from slot to slot;
a `flow` is a set of messages that start together; a `term` is a collective of a lane's replicas, or its part not hidden
by a backward; a `row` is a time that depends on the kinds of devices on a lane; an `entry` is one of the searched
times, which form one vector x of ticks: the full time of every flow, its port time, terms, rows. A `cut` is a critical
path: a constant and a weight for every entry; the estimate is the largest cut.
"""

from __future__ import annotations

from typing import NamedTuple

from pipefit.cost.types import Array
from pipefit.plan.placement.links import Ints


class HostLinks(NamedTuple):
    """The devices of a cluster and the links between them (`links.LinkArrays`). A link is an index of [matrix, host,
    host]."""

    devices: int
    hosts: int
    rails: int
    single: int
    "1 if every host has one device."
    kinds: int
    kind: Ints
    "[device]."
    host: Ints
    "[device]."
    rail: Ints
    "[device]."
    hop: Ints
    "[device]: hop[a] + host[b] is the link from device a to device b."
    shared: Ints
    "[rail]."
    latency: Ints
    "[link]."
    busy: Ints
    "[size, link], with two axes."
    inside_latency: Ints
    "[host]."
    inside_busy: Ints
    "[size, host], with two axes."
    per_byte: Array
    "[link]."
    inside_per_byte: Array
    "[host]."


class PlanTable(NamedTuple):
    """The transfers, collectives and compute of a plan (`shape.PlacementShape`)."""

    lanes: int
    replicas: int
    shards: int
    slots: int
    flows: int
    messages: int
    terms: int
    entries: int
    flow_start: Ints
    "[flow + 1]."
    source: Ints
    "[message], as the three below."
    target: Ints
    size: Ints
    flow_of: Ints
    slot_start: Ints
    "[slot + 1]."
    slot_messages: Ints
    "The messages of every slot."
    term_start: Ints
    "[lane + 1]."
    passes: Ints
    "[term]."
    more: Ints
    "[term]."
    line_start: Ints
    "[term + 1]."
    row_start: Ints
    "[lane + 1]."
    row_time: Ints
    "[row, kind]."
    allowed: Ints
    "[lane + 1, kind]."
    latency_factor: Array
    "[term], as the three below."
    byte_factor: Array
    bytes: Array
    share: Array
    line_share: Array
    "[line]."
    line_beside: Array
    "[line]."


class MoveTable(NamedTuple):
    """The moves that annealing may make: blocks of slots at one or two levels, and racks of devices."""

    levels: int
    rack_count: int
    rack_size: int
    first_level: int
    aimed: int
    until: Ints
    "[kind of move]."
    block_start: Ints
    "[level], as the two below."
    blocks: Ints
    block_width: Ints
    block_slots: Ints
    "[block, slot] of all levels."
    block_of: Ints
    "[level, slot]."
    rack_devices: Ints
    "[rack, device]."


class SearchState(NamedTuple):
    """The placement, its times, the cuts, and the scratch arrays of a move."""

    counters: Ints
    "By the names below: STAMP, CHANGES and others."
    device: Ints
    "[slot]."
    slot_of: Ints
    "[device]."
    message_busy: Ints
    "[message] ticks."
    message_latency: Ints
    "[message] ticks."
    order: Ints
    "[lane, shard, replica]: the slots of a lane sorted by device."
    x: Ints
    "[entry] ticks."
    value: Ints
    "[cut] ticks."
    top: Ints
    "[flow, 4], with two axes: the largest busy ticks and their message, the largest latency and its message."
    weight: Ints
    "[entry, cut], with two axes."
    constant: Ints
    "[cut]."
    load: Ints
    "[port] scratch, always left at 0."
    load_per_byte: Array
    "[port] scratch, always left at 0."
    ring: Array
    "Ten values of the rings of a lane (`rings.ring_facts`)."
    moved_slot: Ints
    "Slots of a move, and their new devices."
    moved_device: Ints
    seen_flow: Ints
    "[flow]: the last move that affected it."
    seen_lane: Ints
    "[lane]: the last move that affected it."
    flow_list: Ints
    "The affected flows."
    lane_list: Ints
    "The affected lanes."
    changed_entry: Ints
    "Entries of x that a noted move changes, and their differences."
    changed_by: Ints
    new_value: Ints
    "[cut] after a noted move."
    new_top: Ints
    "[flow, 4], with two axes, after a noted move."
    rescan: Ints
    "[flow]: 1 if all of its messages must be read again."


STAMP, CHANGES, USED, LEADING, KEEPS, ARRIVED, TOUCHED, NEW_LEADING, KEPT_EDGES = range(9)
"""Counters of `SearchState`: the number of the move, the entries it changes, the cuts in use, the largest of them,
whether the move keeps the devices of every lane, whether it swaps two devices, the flows it touches, the cut that leads
after it, and the number of saved boundaries."""

COUNTERS = 9


class ChainTable(NamedTuple):
    """The search over sets (`sets`, `chains`), where edge k is the boundary between the lanes k and k + 1. Empty if the
    plan is not a chain."""

    edge_start: Ints
    "[edge + 1]."
    edge_flows: Ints
    "The flows of every edge."
    edge_of: Ints
    "[flow]."
    forward: Ints
    "[flow]: whether it goes forward."
    pair_of: Ints
    "[edge]: its matrix of `pair`."
    pair: Ints
    "[matrix, device, device] ticks of a pair."
    partner: Ints
    "[edge, replica]: the right position of every left position."
    back: Ints
    "The inverse of `partner`."
    distance: Ints
    "[replica] scratch, as the two below."
    parent: Ints
    ahead: Ints
    kept_edge: Ints
    "[4]: edges of a move."
    kept_pairs: Ints
    "[4, replica]: their partners before it."
    touched_edge: Ints
    "[4]: edges that a move touches."
    layout: Ints
    "[slot]: the placement pipeline by pipeline."


class SearchTables(NamedTuple):
    """All arrays of a search."""

    links: HostLinks
    plan: PlanTable
    moves: MoveTable
    state: SearchState
    chain: ChainTable


GROUPS = (HostLinks, PlanTable, MoveTable, SearchState, ChainTable)
