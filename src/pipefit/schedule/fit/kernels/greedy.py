"""The inner loops of construction: from a wished start of every operation to orders that fit in memory.

The rules of `pipefit.schedule.fit.kernels.sweep` about numba apply here, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

FAR = 1e300


class ConstructionScratch(NamedTuple):
    """Scratch space of a construction. A row is a forward, a backward or a W of a stage: kind * stages + stage."""

    backwards: Any
    "[n]: the unit of the n-th backward."
    first: Any
    "[lane + 1]: the stages of a lane are `held[first[lane]:first[lane + 1]]`, ascending."
    held: Any
    merge: Any
    "[stage]: whether its backwards run as B."
    slices: int
    done: Any
    "[row]: the number of its operations already placed; a B counts as I and as W."
    count: Any
    "[row]: scratch."
    refused: Any
    "[row]: the operation that does not fit in memory now."
    reserve: Any
    "[lane]: upper bound on the memory of a microbatch; with this much left, all microbatches can end."
    placed: Any
    "[node]"
    arrival: Any
    "[slot, unit]"
    free: Any
    "[lane], as the following fields."
    port: Any
    level: Any
    begin: Any
    best: Any
    "The operation to place next, or -1."
    key: Any
    at: Any
    "Its start."
    dirty: Any


def safe(t: Any, p: Any, lane: int, extra: int) -> bool:
    """Return whether a lane that places operation `extra` next can still end by running one microbatch at a time, each
    with all its forwards first. If that holds for every lane, it holds for all of them together."""
    stages = len(p.merge)
    low, high = p.first[lane], p.first[lane + 1]
    limit = t.limit[lane]
    level = p.level[lane]
    if level + t.need[extra] > limit:
        return False
    level += t.held[extra]
    ahead, back = 0, t.units
    for k in range(low, high):
        stage = p.held[k]
        for kind in range(3):
            p.count[kind * stages + stage] = p.done[kind * stages + stage]
        if t.stage[extra] == stage:
            p.count[t.row[extra]] += 1
            if t.row[extra] == stages + stage and p.merge[stage]:
                p.count[2 * stages + stage] += 1
        ahead = max(ahead, p.count[stage])
        back = min(back, p.count[stages + stage])
        for n in range(p.count[2 * stages + stage], p.count[stages + stage]):
            level += t.held[(2 * stages + stage) * t.units + p.backwards[n]]
    for microbatch in range(back // p.slices, (ahead - 1) // p.slices + 1):
        until = (microbatch + 1) * p.slices
        for k in range(low, high):
            stage = p.held[k]
            for unit in range(p.count[stage], until):
                op = stage * t.units + unit
                if level + t.need[op] > limit:
                    return False
                level += t.held[op]
            p.count[stage] = max(p.count[stage], until)
        for k in range(high - 1, low - 1, -1):
            stage = p.held[k]
            for n in range(p.count[stages + stage], until):
                unit = p.backwards[n]
                if p.merge[stage]:
                    op = (3 * stages + stage) * t.units + unit
                    if level + t.need[op] > limit:
                        return False
                    level += t.held[op]
                else:
                    op = (stages + stage) * t.units + unit
                    if level + t.need[op] > limit:
                        return False
                    level += t.held[op]
                    op = (2 * stages + stage) * t.units + unit
                    if level + t.need[op] > limit:
                        return False
                    level += t.held[op]
            p.count[stages + stage] = max(p.count[stages + stage], until)
    return True


def choose_next(t: Any, p: Any, wish: Any, lane: int) -> None:
    """Choose the next operation of a lane: the one with the earliest start that is not before its wish; among equals,
    the one with the earlier wish."""
    stages = len(p.merge)
    refused = 0
    while True:
        best, first, start, least = -1, FAR, 0.0, FAR
        for k in range(p.first[lane], p.first[lane + 1]):
            stage = p.held[k]
            for kind in range(3):
                row = kind * stages + stage
                n = p.done[row]
                if n >= t.units or (kind == 2 and (p.merge[stage] or n >= p.done[stages + stage])):
                    continue
                unit = n if kind == 0 else p.backwards[n]
                if kind == 1 and unit >= p.done[stage]:
                    continue
                if refused and p.refused[row] == n:
                    continue
                time = p.free[lane]
                ready = True
                for j in range(t.in_first[row], t.in_first[row + 1]):
                    if not p.placed[t.in_row[j] * t.units + unit]:
                        ready = False
                        break
                    time = max(time, p.arrival[t.in_slot[j], unit])
                if not ready:
                    continue
                key = max(time, wish[row, unit])
                if key < first or (key == first and wish[row, unit] < least):
                    best = (3 * stages + stage if kind == 1 and p.merge[stage] else row) * t.units + unit
                    first, start, least = key, time, wish[row, unit]
        p.best[lane], p.key[lane], p.at[lane] = best, first, start
        if best < 0 or t.limit[lane] >= FAR or (t.held[best] <= 0.0 and t.need[best] <= 0.0):
            return
        if p.level[lane] + t.need[best] + p.reserve[lane] <= t.limit[lane] or safe(t, p, lane, best):
            return
        if not refused:
            for k in range(p.first[lane], p.first[lane + 1]):
                for kind in range(3):
                    p.refused[kind * stages + p.held[k]] = -1
        p.refused[t.row[best]] = p.done[t.row[best]]
        refused = 1


def construct(t: Any, p: Any, wish: Any, order: Any, length: Any) -> float:
    """Fill `order` and `length` from the wished starts [row, unit]. Returns the objective, or FAR if memory is too
    small."""
    stages, lanes = len(p.merge), len(p.free)
    for row in range(3 * stages):
        p.done[row] = 0
    for node in range(len(p.placed)):
        p.placed[node] = False
    total = 0
    for lane in range(lanes):
        p.free[lane] = p.port[lane] = p.level[lane] = 0.0
        p.dirty[lane] = True
        length[lane] = 0
        for k in range(p.first[lane], p.first[lane + 1]):
            total += t.units * (2 if p.merge[p.held[k]] else 3)
    for _ in range(total):
        lane = -1
        for candidate in range(lanes):
            if p.dirty[candidate]:
                choose_next(t, p, wish, candidate)
                p.dirty[candidate] = False
            if p.best[candidate] >= 0 and (lane < 0 or p.key[candidate] < p.key[lane]):
                lane = candidate
        if lane < 0:
            return FAR
        op, time = p.best[lane], p.at[lane]
        row, unit = t.row[op], t.unit[op]
        if length[lane] == 0:
            p.begin[lane] = time
        order[lane, length[lane]] = op
        length[lane] += 1
        stop = time + t.time[op]
        p.free[lane] = stop
        p.level[lane] += t.held[op]
        p.done[row] += 1
        if op >= 3 * stages * t.units:
            p.done[2 * stages + t.stage[op]] += 1
        p.placed[t.node[op]] = True
        p.dirty[lane] = True
        for slot in range(t.out_first[row], t.out_first[row + 1]):
            p.arrival[slot, unit] = stop
            if t.crosses[slot]:
                sent = max(stop, p.port[lane])
                p.port[lane] = sent + t.port[slot, unit]
                p.arrival[slot, unit] = sent + t.whole[slot, unit]
            p.dirty[t.row_lane[t.out_row[slot]]] = True
    main = 0.0
    for lane in range(lanes):
        main = max(main, p.free[lane] - (p.begin[lane] if t.span else 0.0))
    return main
