"""The arrays of one placement search: its links and shape, space for cuts and moves, scratch arrays."""

from __future__ import annotations

import numpy as np

from pipefit.cost.types import Array
from pipefit.plan.placement.kernels.tables import (
    COUNTERS,
    ChainTable,
    HostLinks,
    MoveTable,
    PlanTable,
    SearchState,
    SearchTables,
)
from pipefit.plan.placement.links import Ints
from pipefit.plan.placement.shape import PlacementProblem
from pipefit.plan.placement.starts import MoveSet

CUTS = 400
"""Maximum number of critical paths in the estimate; the least important ones are replaced. A search of a second
collects 100 to 400 of them, and is misled by the paths it drops: with space for 48, ten times the moves found nothing
better."""

UNTIL = (800, 900, 915, 930, 950, 960, 990, 1000)
"""Cumulative number of 1,000 moves: swaps, cycles, runs reversed, runs rotated, lanes swapped, runs of lanes reversed,
pipeline tails swapped, racks swapped."""

FIRST_LEVEL = 500
"""Number of 1,000 block moves at the finest level, if there are two."""

AIMED = 500
"""Number of 1,000 swaps that involve a slow slot."""


def new_tables(question: PlacementProblem, chain: ChainTable | None = None) -> SearchTables:
    """Return the arrays of a problem, with `chains.chain_arrays` if it is a chain: no cuts yet, and no moves
    (`with_moves`)."""
    return SearchTables(
        links=_link_table(question),
        plan=_plan_table(question),
        moves=_move_table((), np.zeros((0, 0)), np.zeros(0)),
        state=_search_state(question),
        chain=chain or ChainTable(*(_zeros(0) for _ in ChainTable._fields)),
    )


def with_moves(tables: SearchTables, moves: MoveSet) -> SearchTables:
    """Return the tables with the blocks and racks that the next moves may permute."""
    return tables._replace(moves=_move_table(moves.levels, moves.racks, moves.block_of))


def _move_table(levels: tuple[Ints, ...], racks: Array | Ints, block_of: Array | Ints) -> MoveTable:
    rack_count, rack_size = racks.shape
    return MoveTable(
        levels=len(levels),
        rack_count=rack_count,
        rack_size=rack_size,
        first_level=FIRST_LEVEL,
        aimed=AIMED,
        until=_flat(UNTIL),
        block_start=_flat(np.cumsum([0, *(level.size for level in levels[:-1])])),
        blocks=_flat([len(level) for level in levels]),
        block_width=_flat([level.shape[1] for level in levels]),
        block_slots=_flat(np.concatenate([_zeros(0), *(level.reshape(-1) for level in levels)])),
        block_of=_flat(block_of),
        rack_devices=_flat(racks),
    )


def _link_table(question: PlacementProblem) -> HostLinks:
    links, hosts = question.links, len(question.links.inside_latency)
    sizes = len(links.busy)
    return HostLinks(
        devices=len(question.devices),
        hosts=hosts,
        rails=links.rails,
        single=links.single,
        kinds=question.shape.allowed.shape[1],
        kind=_flat(question.shape.kind),
        host=_flat(links.host),
        rail=_flat(links.rail),
        hop=_flat((links.matrix[links.rail] * hosts + links.host) * hosts),
        shared=_flat(links.shared),
        latency=_flat(links.latency),
        busy=_flat(links.busy).reshape(sizes, links.latency.size),
        inside_latency=_flat(links.inside_latency),
        inside_busy=_flat(links.inside_busy).reshape(sizes, hosts),
        per_byte=_flat_floats(links.per_byte),
        inside_per_byte=_flat_floats(links.inside_per_byte),
    )


def _plan_table(question: PlacementProblem) -> PlanTable:
    shape = question.shape
    return PlanTable(
        lanes=shape.lanes,
        replicas=shape.replicas,
        shards=shape.shards,
        slots=shape.slots,
        flows=question.flow_count,
        messages=len(shape.source),
        terms=len(shape.passes),
        entries=question.entry_count,
        flow_start=_flat(shape.flow_start),
        source=_flat(shape.source),
        target=_flat(shape.target),
        size=_flat(shape.size),
        flow_of=_flat(shape.flow_of),
        slot_start=_flat(shape.slot_start),
        slot_messages=_flat(shape.slot_messages),
        term_start=_flat(shape.term_start),
        passes=_flat(shape.passes),
        more=_flat(shape.more),
        line_start=_flat(shape.line_start),
        row_start=_flat(shape.row_start),
        row_time=_flat(shape.row_time),
        allowed=_flat(shape.allowed),
        latency_factor=_flat_floats(shape.latency_factor),
        byte_factor=_flat_floats(shape.byte_factor),
        bytes=_flat_floats(shape.bytes),
        share=_flat_floats(shape.share),
        line_share=_flat_floats(shape.line_share),
        line_beside=_flat_floats(shape.line_beside),
    )


def _search_state(question: PlacementProblem) -> SearchState:
    shape, devices, flows = question.shape, len(question.devices), question.flow_count
    entries, messages, ports = question.entry_count, len(shape.source), _port_count(question)
    order = np.arange(shape.slots).reshape(shape.lanes, shape.replicas, shape.shards).transpose(0, 2, 1)
    return SearchState(
        counters=_zeros(COUNTERS),
        device=_flat(question.devices),
        slot_of=_zeros(devices),
        message_busy=_zeros(messages),
        message_latency=_zeros(messages),
        order=_flat(order),
        x=_zeros(entries),
        value=_zeros(CUTS),
        top=_zeros(flows, 4),
        weight=_zeros(entries, CUTS),
        constant=_zeros(CUTS),
        load=_zeros(ports),
        load_per_byte=np.zeros(ports),
        ring=np.zeros(10),
        moved_slot=_zeros(devices + 8),
        moved_device=_zeros(devices + 8),
        seen_flow=_zeros(flows),
        seen_lane=_zeros(shape.lanes),
        flow_list=_zeros(flows),
        lane_list=_zeros(shape.lanes),
        changed_entry=_zeros(entries),
        changed_by=_zeros(entries),
        new_value=_zeros(CUTS),
        new_top=_zeros(flows, 4),
        rescan=_zeros(flows),
    )


def _zeros(*shape: int) -> Ints:
    return np.zeros(shape, dtype=np.int64)


def _flat(values: object) -> Ints:
    """Return a flat copy: the types of all tables are equal, so that one compilation serves all searches."""
    return np.array(values, dtype=np.int64, order="C").reshape(-1)


def _flat_floats(values: Array) -> Array:
    return np.array(values, dtype=np.float64, order="C").reshape(-1)


def _port_count(question: PlacementProblem) -> int:
    """Return the number of ports counted by `rings.add_load`."""
    links = question.links
    return 2 * len(question.devices) + 2 * len(links.inside_latency) * links.rails
