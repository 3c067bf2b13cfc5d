"""The arena of one placement search: its links and shape, space for cuts and moves, scratch arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipefit.cost.types import Array
from pipefit.plan.placement.kernels import arena as names
from pipefit.plan.placement.kernels.arena import KernelArena, make_arena
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


def new_state(question: PlacementProblem, chain: Mapping[int, Ints] | None = None) -> KernelArena:
    """Return the arena of a problem, with `chains.chain_arrays` if it is a chain: no cuts yet, and no moves
    (`set_moves`)."""
    links, shape = question.links, question.shape
    devices, hosts = len(question.devices), len(links.inside_latency)
    numbers = {
        names.DEVICES: devices,
        names.HOSTS: hosts,
        names.MATRICES: len(links.latency),
        names.RAILS: links.rails,
        names.SINGLE: links.single,
        names.KINDS: shape.allowed.shape[1],
        names.LANE_COUNT: shape.lanes,
        names.REPLICAS: shape.replicas,
        names.SHARDS: shape.shards,
        names.SLOTS: shape.slots,
        names.FLOWS: question.flow_count,
        names.MESSAGES: len(shape.source),
        names.TERMS: len(shape.passes),
        names.ENTRIES: question.entry_count,
        names.CUT_ROOM: CUTS,
        names.FIRST_LEVEL: FIRST_LEVEL,
        names.AIMED: AIMED,
    }
    return make_arena(
        numbers, {**_fact_arrays(question), **_scratch_arrays(question), **(chain or {})}, _real_arrays(question)
    )


def set_moves(arena: KernelArena, moves: MoveSet) -> None:
    """Set the blocks and racks that the next moves may permute."""
    arena.at[names.LEVELS] = len(moves.levels)
    arena.at[names.RACK_COUNT], arena.at[names.RACK_SIZE] = moves.racks.shape
    arena.fill_array(names.BLOCK_START, np.cumsum([0, *(level.size for level in moves.levels[:-1])]))
    arena.fill_array(names.BLOCKS, np.array([len(level) for level in moves.levels]))
    arena.fill_array(names.BLOCK_WIDTH, np.array([level.shape[1] for level in moves.levels]))
    arena.fill_array(names.BLOCK_SLOTS, np.concatenate([level.reshape(-1) for level in moves.levels]))
    arena.fill_array(names.BLOCK_OF, moves.block_of)
    arena.fill_array(names.RACK_DEVICES, moves.racks)


def _fact_arrays(question: PlacementProblem) -> dict[int, Ints]:
    links, shape = question.links, question.shape
    return {
        names.HOST: links.host,
        names.RAIL: links.rail,
        names.MATRIX: links.matrix,
        names.HOP: (links.matrix[links.rail] * len(links.inside_latency) + links.host) * len(links.inside_latency),
        names.SHARED: links.shared,
        names.LATENCY: links.latency,
        names.BUSY: links.busy,
        names.INSIDE_LATENCY: links.inside_latency,
        names.INSIDE_BUSY: links.inside_busy,
        names.KIND: shape.kind,
        names.FLOW_START: shape.flow_start,
        names.SOURCE: shape.source,
        names.TARGET: shape.target,
        names.SIZE: shape.size,
        names.FLOW_OF: shape.flow_of,
        names.SLOT_START: shape.slot_start,
        names.SLOT_MESSAGES: shape.slot_messages,
        names.TERM_START: shape.term_start,
        names.PASSES: shape.passes,
        names.MORE: shape.more,
        names.LINE_START: shape.line_start,
        names.ROW_START: shape.row_start,
        names.ROW_TIME: shape.row_time,
        names.ALLOWED: shape.allowed,
        names.UNTIL: np.array(UNTIL),
    }


def _scratch_arrays(question: PlacementProblem) -> dict[int, Ints]:
    shape, devices = question.shape, len(question.devices)
    order = np.arange(shape.slots).reshape(shape.lanes, shape.replicas, shape.shards).transpose(0, 2, 1)
    sizes = {
        names.BLOCK_START: 2,
        names.BLOCKS: 2,
        names.BLOCK_WIDTH: 2,
        names.BLOCK_SLOTS: 2 * devices,
        names.BLOCK_OF: 2 * devices,
        names.RACK_DEVICES: devices,
        names.WEIGHT: question.entry_count * CUTS,
        names.CONSTANT: CUTS,
        names.SLOT_OF: devices,
        names.MESSAGE_BUSY: len(shape.source),
        names.MESSAGE_LATENCY: len(shape.source),
        names.X: question.entry_count,
        names.VALUE: CUTS,
        names.TOP: 4 * question.flow_count,
        names.LOAD: _port_count(question),
        names.MOVED_SLOT: devices + 8,
        names.MOVED_DEVICE: devices + 8,
        names.SEEN_FLOW: question.flow_count,
        names.SEEN_LANE: shape.lanes,
        names.FLOW_LIST: question.flow_count,
        names.LANE_LIST: shape.lanes,
        names.CHANGED_ENTRY: question.entry_count,
        names.CHANGED_BY: question.entry_count,
        names.NEW_VALUE: CUTS,
        names.NEW_TOP: 4 * question.flow_count,
        names.RESCAN: question.flow_count,
    }
    empty = {name: np.zeros(size, dtype=np.int64) for name, size in sizes.items()}
    return {names.DEVICE: question.devices, names.ORDER: order, **empty}


def _real_arrays(question: PlacementProblem) -> dict[int, Array]:
    links, shape = question.links, question.shape
    return {
        names.PER_BYTE: links.per_byte,
        names.INSIDE_PER_BYTE: links.inside_per_byte,
        names.LATENCY_FACTOR: shape.latency_factor,
        names.BYTE_FACTOR: shape.byte_factor,
        names.BYTES: shape.bytes,
        names.SHARE: shape.share,
        names.LINE_SHARE: shape.line_share,
        names.LINE_BESIDE: shape.line_beside,
        names.RING: np.zeros(10),
        names.LOAD_PER_BYTE: np.zeros(_port_count(question)),
    }


def _port_count(question: PlacementProblem) -> int:
    """Return the number of ports counted by `rings.add_load`."""
    links = question.links
    return 2 * len(question.devices) + 2 * len(links.inside_latency) * links.rails
