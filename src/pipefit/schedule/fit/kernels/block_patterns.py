"""The inner loop of `starts.patterns`: from a building block of slots to the orders of a V, in tens of microseconds.

The passes are those of `schedule.blocks.reorder`, followed by the remaining steps of the published adaptive search (Qi
et al. 2024, arXiv 2405.15362, section 3.3 and appendix A): repeat, squeeze, reorder both ends, fill the remaining
holes. Here they work on arrays of one block at a time (`kernels.block_passes`). The rules of
`pipefit.schedule.fit.kernels.sweep` about numba apply here, too.
"""

from __future__ import annotations

from typing import Any

from pipefit.schedule.fit.kernels.block_passes import (
    SORTS,
    fill_peaks,
    first_slot,
    keep_units,
    lay_offsets,
    read_grid,
    repeat_block,
    squeeze_passes,
    write_grid,
)
from pipefit.schedule.fit.kernels.sweep import INFINITE, sweep


def take_pass(p: Any, lane: int, sort: int, n: int) -> int:
    """Place a pass of a sort as the n-th pass of a lane if one is left, and return the number of passes."""
    if p.left[lane, sort] > 0:
        p.left[lane, sort] -= 1
        p.row[lane, n] = sort
        return n + 1
    return n


def warm_up(p: Any, most: int) -> None:
    """Reorder the passes of every lane before the first backward of its down stage so that memory fills sooner (as
    `schedule.blocks.reorder.reorder_warm_up`)."""
    depth = len(p.length)
    most = min(most, 2 * depth)
    for lane in range(depth):
        for sort in range(SORTS):
            p.left[lane, sort] = 0
        end = 0
        while p.row[lane, end] != 2:
            p.left[lane, p.row[lane, end]] += 1
            end += 1
        up = min(lane + 1, most // 2, p.left[lane, 1])
        down = min(most - min(lane + 1, most // 2), p.left[lane, 0])
        n = 0
        for position in range(2 * (depth - 1 - lane) + lane + 1):
            if down:
                before = n
                n = take_pass(p, lane, 0, n)
                down -= n - before
            if up and position >= 2 * (depth - 1 - lane):
                before = n
                n = take_pass(p, lane, 1, n)
                up -= n - before
        while n < end:
            n = take_pass(p, lane, 3, n)
            n = take_pass(p, lane, 5, n)
            before = n
            n = take_pass(p, lane, 1, n)
            if n == before:
                n = take_pass(p, lane, 0, n)


def cool_down(p: Any, most: int, units: int) -> bool:
    """Move the last backwards of every lane as close together as the chain of stages allows, with W's in the remaining
    slots.

    Does the same as `schedule.blocks.reorder.reorder_cool_down`. Returns False if two passes would share a slot.
    """
    depth = len(p.length)
    downs = min((most + 1) // 2, units)
    turn = 0
    for position in range(p.length[0]):
        if p.row[0, position] == 1:
            turn = p.start[0, position]
    for lane in range(depth):
        ups = min(lane + 1, most - downs, units)
        end = write_grid(p, lane)
        lift_passes(p, lane, end, 2, downs)
        lift_passes(p, lane, end, 3, ups)
        lift_weights(p, lane, end, downs, ups, most)
        for k in range(downs):
            slot = turn + 2 * depth - lane - 2 * k
            if slot < 0 or slot >= p.grid.shape[1] or p.grid[lane, slot] >= 0:
                return False
            p.grid[lane, slot] = 2
        for k in range(ups):
            slot = turn + 1 + lane - 2 * k
            if slot < 0 or slot >= p.grid.shape[1] or p.grid[lane, slot] >= 0:
                return False
            p.grid[lane, slot] = 3
        if not fill_weights(p, lane):
            return False
        read_grid(p, lane)
    return True


def lift_passes(p: Any, lane: int, end: int, sort: int, count: int) -> None:
    """Remove the last `count` passes of a sort from the grid."""
    slot = end - 1
    while count > 0 and slot >= 0:
        if p.grid[lane, slot] == sort:
            p.grid[lane, slot] = -1
            count -= 1
        slot -= 1


def lift_weights(p: Any, lane: int, end: int, downs: int, ups: int, total: int) -> None:
    """Remove W's from the end until at least `downs` and `ups` of each direction and `total` in all have been
    removed."""
    lifted_down = lifted_up = 0
    for slot in range(end - 1, -1, -1):
        if lifted_down >= downs and lifted_up >= ups and lifted_down + lifted_up >= total:
            return
        if p.grid[lane, slot] == 4:
            lifted_down += 1
            p.grid[lane, slot] = -1
        elif p.grid[lane, slot] == 5:
            lifted_up += 1
            p.grid[lane, slot] = -1


def fill_weights(p: Any, lane: int) -> bool:
    """Insert the removed W's into empty slots after the last remaining one, and at the end, up before down.

    Returns whether there were enough slots.
    """
    first = last = 0
    for slot in range(p.grid.shape[1]):
        if p.grid[lane, slot] >= 0:
            last = slot
            if p.grid[lane, slot] >= 4:
                first = slot + 1
    down = up = slot = 0
    while slot <= last or down > 0 or up > 0:
        if slot >= p.grid.shape[1]:
            return False
        sort = p.grid[lane, slot]
        if sort >= 0:
            if sort == 2:
                down += 1
            elif sort == 3:
                up += 1
            elif sort == 4:
                down -= 1
            elif sort == 5:
                up -= 1
        elif slot >= first and (up > 0 or down > 0):
            if up > 0:
                p.grid[lane, slot] = 5
                up -= 1
            else:
                p.grid[lane, slot] = 4
                down -= 1
        slot += 1
    return True


def fill_holes(p: Any) -> None:
    """Fill every hole, slot by slot, with a later pass of its lane if one can move.

    A pass can move if its inputs are done; an F also must not raise the lane above the highest peak. Only the next pass
    of each sort is considered, nearest first.
    """
    depth = len(p.length)
    last = 2 * depth - 1
    highest = fill_peaks(p)
    end = 0
    for lane in range(depth):
        end = max(end, write_grid(p, lane))
        p.free[lane] = 0
        for sort in range(SORTS):
            p.count[lane, sort] = p.left[lane, sort] = 0
        for position in range(p.length[lane]):
            p.left[lane, p.row[lane, position]] += 1
    for stage in range(2 * depth):
        for unit in range(p.stop.shape[2]):
            p.stop[0, stage, unit] = p.stop[1, stage, unit] = -1
    for slot in range(end):
        for lane in range(depth):
            if p.grid[lane, slot] < 0:
                movable = find_movable(p, lane, slot, end, highest - p.free[lane])
                if movable < 0:
                    continue
                p.grid[lane, slot] = p.grid[lane, movable]
                p.grid[lane, movable] = -1
            sort = p.grid[lane, slot]
            kind, stage = sort // 2, last - lane if sort % 2 else lane
            if kind == 0:
                p.free[lane] += 1
            elif kind == 2:
                p.free[lane] -= 1
            if kind < 2:
                p.stop[kind, stage, p.count[lane, sort]] = slot + 1
            p.count[lane, sort] += 1
            p.left[lane, sort] -= 1
    for lane in range(depth):
        read_grid(p, lane)


def find_movable(p: Any, lane: int, hole: int, end: int, room: int) -> int:
    """Return the slot of the first later pass that may move into the hole, or -1."""
    last = p.stop.shape[1] - 1
    open_sorts = 0
    for sort in range(SORTS):
        if p.left[lane, sort] > 0:
            open_sorts |= 1 << sort
    change = highest = 0
    for slot in range(hole + 1, end):
        if not open_sorts:
            return -1
        sort = p.grid[lane, slot]
        if sort < 0:
            continue
        kind = sort // 2
        before = highest
        change += 1 if kind == 0 else -1 if kind == 2 else 0
        highest = max(highest, change)
        if not open_sorts >> sort & 1:
            continue
        open_sorts &= ~(1 << sort)
        if kind == 0 and before >= room:
            continue
        unit = p.count[lane, sort]
        if kind == 2:
            if p.count[lane, sort - 2] > unit:
                return slot
            continue
        ready = first_slot(p, kind, last - lane if sort % 2 else lane, unit)
        if ready >= 0 and ready <= hole:
            return slot
    return -1


def name_passes(t: Any, s: Any, p: Any) -> None:
    """Write the orders of operations; W's are first in, first out over both directions of a lane."""
    depth = len(p.length)
    stages = 2 * depth
    for lane in range(depth):
        for sort in range(SORTS):
            p.count[lane, sort] = 0
        read = write = 0
        for position in range(p.length[lane]):
            sort = p.row[lane, position]
            kind, stage = sort // 2, stages - 1 - lane if sort % 2 else lane
            node = stage * t.units + p.count[lane, sort]
            p.count[lane, sort] += 1
            if kind == 1:
                p.queue[write] = node
                write += 1
            elif kind == 2:
                node = p.queue[read]
                read += 1
            s.order[lane, position] = kind * stages * t.units + node
        s.length[lane] = p.length[lane]


def fits_in_memory(t: Any, s: Any) -> bool:
    """Return whether the orders fit in memory."""
    for lane in range(len(s.length)):
        if t.limit[lane] >= INFINITE:
            continue
        level = 0.0
        for position in range(s.length[lane]):
            op = s.order[lane, position]
            if level + t.need[op] > t.limit[lane]:
                return False
            level += t.held[op]
    return True


def evaluate_block(t: Any, s: Any, p: Any, slots: Any, hops: Any, n: int) -> float:
    """Build and evaluate the orders of block n in the state.

    Returns the objective, or INFINITE if they do not fit in memory or cannot be built.
    """
    depth = len(p.length)
    units = max(t.units, 2 * depth)
    lay_offsets(p, slots, hops, n)
    repeat_block(p, units)
    peak = fill_peaks(p)
    if peak > 2 * depth:
        return INFINITE
    if units == t.units:
        name_passes(t, s, p)
        if not fits_in_memory(t, s):
            return INFINITE
    if not squeeze_passes(p):
        return INFINITE
    warm_up(p, peak)
    if not squeeze_passes(p) or fill_peaks(p) > peak:
        return INFINITE
    if units > t.units:
        keep_units(p, t.units)
        if not squeeze_passes(p):
            return INFINITE
        peak = fill_peaks(p)
    if not cool_down(p, peak, t.units) or not squeeze_passes(p):
        return INFINITE
    fill_holes(p)
    if fill_peaks(p) > peak:
        return INFINITE
    name_passes(t, s, p)
    if not fits_in_memory(t, s) or not sweep(t, s):
        return INFINITE
    return float(s.value[0])


def patterns(t: Any, s: Any, p: Any, slots: Any, hops: Any, values: Any) -> None:
    """Fill `values` with the objectives of the blocks of `slots` [block, 3] and `hops` [block, lane]."""
    for n in range(len(values)):
        values[n] = evaluate_block(t, s, p, slots, hops, n)
