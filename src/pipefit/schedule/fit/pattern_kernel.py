"""The inner loop of `patterns`: from a building block of slots to the orders of a V, in tens of microseconds.

The passes are those of `block_passes` and `block_reorder`, and what the published adaptive search does after them
(Qi et al. 2024, arXiv 2405.15362, section 3.3 and appendix A): repeat, squeeze, reorder both ends, fill the holes that
are left. Here they work on whole arrays of one block after the other. A **sort** is a pass of a lane: 2 * kind + way,
with kinds F, I, W and ways down (stage i of lane i) and up (stage 2 d - 1 - i). The n-th of its sort is unit n.

The rules of `pipefit.schedule.fit.kernel` about numba hold here, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pipefit.schedule.fit.kernel import INFINITE, sweep

INTERVAL = 6
SORTS = 6


class Scratch(NamedTuple):
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


def lay(p: Any, slots: Any, hops: Any, n: int) -> None:
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


def repeat(p: Any, units: int) -> None:
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


def peaks(p: Any) -> int:
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


def squeeze(p: Any) -> bool:
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
                ready = needed(p, kind, stage, unit)
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


def needed(p: Any, kind: int, stage: int, unit: int) -> int:
    """The first slot for a pass by what it needs; -1 if that has not been placed."""
    last = p.stop.shape[1] - 1
    if kind == 2 or (kind == 0 and stage == 0):
        return 0
    if kind == 0:
        return int(p.stop[0, stage - 1, unit])
    return int(p.stop[0, stage, unit] if stage == last else p.stop[1, stage + 1, unit])


def take(p: Any, lane: int, sort: int, n: int) -> int:
    """Place one of a sort as the n-th pass of a lane if one is left; returns the number of passes."""
    if p.left[lane, sort] > 0:
        p.left[lane, sort] -= 1
        p.row[lane, n] = sort
        return n + 1
    return n


def warm_up(p: Any, most: int) -> None:
    """The passes of every lane before its first backward of the way down, in an order that takes memory sooner (as
    `block_reorder.reorder_warm_up`)."""
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
        for place in range(2 * (depth - 1 - lane) + lane + 1):
            if down:
                before = n
                n = take(p, lane, 0, n)
                down -= n - before
            if up and place >= 2 * (depth - 1 - lane):
                before = n
                n = take(p, lane, 1, n)
                up -= n - before
        while n < end:
            n = take(p, lane, 3, n)
            n = take(p, lane, 5, n)
            before = n
            n = take(p, lane, 1, n)
            if n == before:
                n = take(p, lane, 0, n)


def keep(p: Any, units: int) -> None:
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


def cool_down(p: Any, most: int, units: int) -> bool:
    """The last backwards of every lane as close together as the chain of stages allows, with W's in what is left (as
    `block_reorder.reorder_cool_down`). Returns False where two passes would claim one slot."""
    depth = len(p.length)
    downs = min((most + 1) // 2, units)
    turn = 0
    for place in range(p.length[0]):
        if p.row[0, place] == 1:
            turn = p.start[0, place]
    for lane in range(depth):
        ups = min(lane + 1, most - downs, units)
        end = write_grid(p, lane)
        lift(p, lane, end, 2, downs)
        lift(p, lane, end, 3, ups)
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


def lift(p: Any, lane: int, end: int, sort: int, count: int) -> None:
    """Take the last `count` passes of a sort out of the grid."""
    slot = end - 1
    while count > 0 and slot >= 0:
        if p.grid[lane, slot] == sort:
            p.grid[lane, slot] = -1
            count -= 1
        slot -= 1


def lift_weights(p: Any, lane: int, end: int, downs: int, ups: int, total: int) -> None:
    """Take W's out from the end until there are at least so many of each way, and so many in all."""
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
    """Put the lifted W's into empty slots behind the last one that stayed, and behind everything, up before down.
    Returns whether there were slots enough."""
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
    """Slot by slot, every hole filled with a later pass of its lane if one can move: what it needs is done, and no F
    takes the lane above the highest peak. Of each sort only the next one is looked at, nearest first."""
    depth = len(p.length)
    last = 2 * depth - 1
    most = peaks(p)
    end = 0
    for lane in range(depth):
        end = max(end, write_grid(p, lane))
        p.free[lane] = 0
        for sort in range(SORTS):
            p.count[lane, sort] = p.left[lane, sort] = 0
        for place in range(p.length[lane]):
            p.left[lane, p.row[lane, place]] += 1
    for stage in range(2 * depth):
        for unit in range(p.stop.shape[2]):
            p.stop[0, stage, unit] = p.stop[1, stage, unit] = -1
    for slot in range(end):
        for lane in range(depth):
            if p.grid[lane, slot] < 0:
                found = movable(p, lane, slot, end, most - p.free[lane])
                if found < 0:
                    continue
                p.grid[lane, slot] = p.grid[lane, found]
                p.grid[lane, found] = -1
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


def movable(p: Any, lane: int, hole: int, end: int, room: int) -> int:
    """The slot of the first later pass that may move into the hole, or -1."""
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
        ready = needed(p, kind, last - lane if sort % 2 else lane, unit)
        if ready >= 0 and ready <= hole:
            return slot
    return -1


def name_passes(t: Any, s: Any, p: Any) -> None:
    """The orders of operations: W's first in, first out over both ways of a lane."""
    depth = len(p.length)
    stages = 2 * depth
    for lane in range(depth):
        for sort in range(SORTS):
            p.count[lane, sort] = 0
        read = write = 0
        for place in range(p.length[lane]):
            sort = p.row[lane, place]
            kind, stage = sort // 2, stages - 1 - lane if sort % 2 else lane
            node = stage * t.units + p.count[lane, sort]
            p.count[lane, sort] += 1
            if kind == 1:
                p.queue[write] = node
                write += 1
            elif kind == 2:
                node = p.queue[read]
                read += 1
            s.order[lane, place] = kind * stages * t.units + node
        s.length[lane] = p.length[lane]


def fits(t: Any, s: Any) -> bool:
    """Whether memory suffices for the orders."""
    for lane in range(len(s.length)):
        if t.limit[lane] >= INFINITE:
            continue
        level = 0.0
        for place in range(s.length[lane]):
            op = s.order[lane, place]
            if level + t.need[op] > t.limit[lane]:
                return False
            level += t.held[op]
    return True


def pattern(t: Any, s: Any, p: Any, slots: Any, hops: Any, n: int) -> float:
    """The orders of block n, evaluated: fills the state. Returns the objective, or INFINITE where memory is too small
    or no orders come out."""
    depth = len(p.length)
    units = max(t.units, 2 * depth)
    lay(p, slots, hops, n)
    repeat(p, units)
    most = peaks(p)
    if most > 2 * depth:
        return INFINITE
    if units == t.units:
        name_passes(t, s, p)
        if not fits(t, s):
            return INFINITE
    if not squeeze(p):
        return INFINITE
    warm_up(p, most)
    if not squeeze(p) or peaks(p) > most:
        return INFINITE
    if units > t.units:
        keep(p, t.units)
        if not squeeze(p):
            return INFINITE
        most = peaks(p)
    if not cool_down(p, most, t.units) or not squeeze(p):
        return INFINITE
    fill_holes(p)
    if peaks(p) > most:
        return INFINITE
    name_passes(t, s, p)
    if not fits(t, s) or not sweep(t, s):
        return INFINITE
    return float(s.value[0])


def patterns(t: Any, s: Any, p: Any, slots: Any, hops: Any, values: Any) -> None:
    """The objective of every block [block, 3] and [block, lane]."""
    for n in range(len(values)):
        values[n] = pattern(t, s, p, slots, hops, n)
