"""Building blocks of a V in arrays: their offsets, their repetition, and every pass as early as it can be.

What `block` and `block_passes` do with objects, for `pattern_kernel`. A **sort** is a pass of a lane: 2 * kind + way,
with kinds F, I, W and ways down (stage i of lane i) and up (stage 2 d - 1 - i). The n-th of its sort is unit n. The
rules of `pipefit.schedule.fit.kernels.sweep` about numba hold here, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

INTERVAL = 6
SORTS = 6


class BlockScratch(NamedTuple):
    """What one block after the other is built in."""

    offset: Any
    "[lane, sort]: the slot of unit 0."
    at: Any
    "[lane, slot modulo the interval]: the sort."
    row: Any
    "[lane, place]: the sort."
    start: Any
    "[lane, place]: the slot."
    length: Any
    grid: Any
    "[lane, slot]: the sort, or -1."
    stop: Any
    "[0 forward or 1 backward, stage, unit]: the slot behind it, or -1."
    count: Any
    "[lane, sort], as is the next."
    left: Any
    place: Any
    "[lane], as are the next two."
    free: Any
    peak: Any
    queue: Any
    "[operation]: the W's that wait, as those of F's stage and unit."


def lay_offsets(p: Any, slots: Any, hops: Any, n: int) -> None:
    """The offsets of block n: lane 0's F of the way up, I of the way up and I of the way down stand in `slots` modulo
    the interval, lane i + 1 has its passes `hops[n, i]` slots later away from lane 0 or one earlier towards it."""
    depth = len(p.length)
    reached = -1
    for part in range(4):  # F down, F up, I up, I down
        way = 1 if part == 1 or part == 2 else 0
        sort = 2 * (part // 2) + way
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
    """The block so many times, one interval apart."""
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
    """Fill in the most stage-microbatches that each lane holds; returns the most of all."""
    most = 0
    for lane in range(len(p.length)):
        held = peak = 0
        for place in range(p.length[lane]):
            kind = p.row[lane, place] // 2
            if kind == 0:
                held += 1
                peak = max(peak, held)
            elif kind == 2:
                held -= 1
        p.peak[lane] = peak
        most = max(most, peak)
    return most


def squeeze_passes(p: Any) -> bool:
    """Every pass as early as its lane and the chain of stages allow, in unchanged order. Returns whether it can run."""
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
    """The first slot for a pass by what it needs; -1 if that has not been placed."""
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
        for place in range(p.length[lane]):
            sort = p.row[lane, place]
            p.count[lane, sort] += 1
            if p.count[lane, sort] <= units:
                p.row[lane, n] = sort
                n += 1
        p.length[lane] = n


def write_grid(p: Any, lane: int) -> int:
    """A lane's passes by slot; returns the number of slots."""
    for slot in range(p.grid.shape[1]):
        p.grid[lane, slot] = -1
    for place in range(p.length[lane]):
        p.grid[lane, p.start[lane, place]] = p.row[lane, place]
    return int(p.start[lane, p.length[lane] - 1]) + 1


def read_grid(p: Any, lane: int) -> None:
    """The passes of a lane in the order of their slots."""
    n = 0
    for slot in range(p.grid.shape[1]):
        if p.grid[lane, slot] >= 0:
            p.row[lane, n] = p.grid[lane, slot]
            p.start[lane, n] = slot
            n += 1
    p.length[lane] = n
