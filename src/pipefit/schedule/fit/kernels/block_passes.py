"""Building blocks of a V in arrays: their offsets, their repetition, and squeezing every pass to its earliest slot.

These functions do on arrays, for `kernels.block_patterns`, the work of `schedule.blocks.building_block` and
`schedule.blocks.passes`: a search tries hundreds of blocks in tens of microseconds each. The plain functions build one
schedule without numba, with slices and with placements other than a V. A test holds both to the same orders. A
**sort** is a kind of pass of a lane: 2 * kind + direction, with kinds F, I, W and
directions down (stage i of lane i) and up (stage 2 d - 1 - i). The n-th pass of its sort is unit n. The rules of
`pipefit.schedule.fit.kernels.sweep` about numba apply here, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

INTERVAL = 6
SORTS = 6


class BlockScratch(NamedTuple):
    """Scratch space in which blocks are built one at a time."""

    offset: Any
    "[lane, sort]: the slot of unit 0."
    at: Any
    "[lane, slot modulo the interval]: the sort."
    row: Any
    "[lane, position]: the sort."
    start: Any
    "[lane, position]: the slot."
    length: Any
    grid: Any
    "[lane, slot]: the sort, or -1."
    stop: Any
    "[0 forward or 1 backward, stage, unit]: the slot after it, or -1."
    count: Any
    "[lane, sort], as the next field."
    left: Any
    place: Any
    "[lane], as the next two fields."
    free: Any
    peak: Any
    queue: Any
    "[operation]: the waiting W's, as F nodes of the same stage and unit."


def lay_offsets(p: Any, slots: Any, hops: Any, n: int) -> None:
    """Compute the offsets of block n.

    On lane 0, the F up, I up and I down are in `slots` modulo the interval. Lane i + 1 has its passes `hops[n, i]`
    slots after lane i in the direction away from lane 0, or one slot earlier in the other direction.
    """
    depth = len(p.length)
    reached = -1
    for part in range(4):  # F down, F up, I up, I down
        direction = 1 if part == 1 or part == 2 else 0
        sort = 2 * (part // 2) + direction
        slot = slots[n, part - 1] if part else 0
        ahead = 0
        if part % 2:
            for lane in range(depth - 1, -1, -1):
                reached += 1 + (slot - lane - reached - 1) % INTERVAL
                p.offset[lane, sort] = reached
        else:
            for lane in range(depth):
                reached += 1 + (slot + ahead - reached - 1) % INTERVAL
                p.offset[lane, sort] = reached
                if lane + 1 < depth:
                    ahead += hops[n, lane]
    for lane in range(depth):
        for slot in range(INTERVAL):
            p.at[lane, slot] = -1
        for sort in range(4):
            p.at[lane, p.offset[lane, sort] % INTERVAL] = sort
        sooner = 2 if p.offset[lane, 2] < p.offset[lane, 3] else 3
        for back in (sooner, 5 - sooner):
            slot = p.offset[lane, back] + 1
            while p.at[lane, slot % INTERVAL] >= 0:
                slot += 1
            p.offset[lane, back + 2] = slot
            p.at[lane, slot % INTERVAL] = back + 2


def repeat_block(p: Any, units: int) -> None:
    """Repeat the block `units` times, one interval apart."""
    for lane in range(len(p.length)):
        first, last = p.offset[lane, 0], p.offset[lane, 0]
        for sort in range(1, SORTS):
            first, last = min(first, p.offset[lane, sort]), max(last, p.offset[lane, sort])
        n = 0
        for slot in range(first, last + INTERVAL * (units - 1) + 1):
            sort = p.at[lane, slot % INTERVAL]
            unit = (slot - p.offset[lane, sort]) // INTERVAL
            if 0 <= unit < units:
                p.row[lane, n] = sort
                p.start[lane, n] = slot
                n += 1
        p.length[lane] = n


def fill_peaks(p: Any) -> int:
    """Fill in the peak of stage-microbatches of each lane, and return the maximum over lanes."""
    highest = 0
    for lane in range(len(p.length)):
        held = peak = 0
        for position in range(p.length[lane]):
            kind = p.row[lane, position] // 2
            if kind == 0:
                held += 1
                peak = max(peak, held)
            elif kind == 2:
                held -= 1
        p.peak[lane] = peak
        highest = max(highest, peak)
    return highest


def squeeze_passes(p: Any) -> bool:
    """Move every pass as early as its lane and the chain of stages allow, in unchanged order. Returns whether it can
    run."""
    depth = len(p.length)
    last = 2 * depth - 1
    for stage in range(2 * depth):
        for unit in range(p.stop.shape[2]):
            p.stop[0, stage, unit] = p.stop[1, stage, unit] = -1
    for lane in range(depth):
        p.place[lane] = p.free[lane] = 0
        for sort in range(SORTS):
            p.count[lane, sort] = 0
    placed, before = 0, -1
    while placed > before:
        before = placed
        for lane in range(depth):
            while p.place[lane] < p.length[lane]:
                sort = p.row[lane, p.place[lane]]
                kind, stage = sort // 2, last - lane if sort % 2 else lane
                unit = p.count[lane, sort]
                ready = first_slot(p, kind, stage, unit)
                if ready < 0:
                    break
                slot = max(ready, p.free[lane])
                p.start[lane, p.place[lane]] = slot
                p.free[lane] = slot + 1
                p.count[lane, sort] += 1
                p.place[lane] += 1
                placed += 1
                if kind < 2:
                    p.stop[kind, stage, unit] = slot + 1
    for lane in range(depth):
        placed -= p.length[lane]
    return placed == 0


def first_slot(p: Any, kind: int, stage: int, unit: int) -> int:
    """Return the first slot after the inputs of a pass; -1 if they have not been placed."""
    last = p.stop.shape[1] - 1
    if kind == 2 or (kind == 0 and stage == 0):
        return 0
    if kind == 0:
        return int(p.stop[0, stage - 1, unit])
    return int(p.stop[0, stage, unit] if stage == last else p.stop[1, stage + 1, unit])


def keep_units(p: Any, units: int) -> None:
    """Drop all units from `units` on."""
    for lane in range(len(p.length)):
        for sort in range(SORTS):
            p.count[lane, sort] = 0
        n = 0
        for position in range(p.length[lane]):
            sort = p.row[lane, position]
            p.count[lane, sort] += 1
            if p.count[lane, sort] <= units:
                p.row[lane, n] = sort
                n += 1
        p.length[lane] = n


def write_grid(p: Any, lane: int) -> int:
    """Write a lane's passes into the grid by slot, and return the number of slots."""
    for slot in range(p.grid.shape[1]):
        p.grid[lane, slot] = -1
    for position in range(p.length[lane]):
        p.grid[lane, p.start[lane, position]] = p.row[lane, position]
    return int(p.start[lane, p.length[lane] - 1]) + 1


def read_grid(p: Any, lane: int) -> None:
    """Read the passes of a lane from the grid, in the order of their slots."""
    n = 0
    for slot in range(p.grid.shape[1]):
        if p.grid[lane, slot] >= 0:
            p.row[lane, n] = p.grid[lane, slot]
            p.start[lane, n] = slot
            n += 1
    p.length[lane] = n
