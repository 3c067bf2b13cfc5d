"""The inner loop of the local search: random changes of orders, kept if they cost little.

A change moves operations within their lanes, one, a run of one row, or a wave over several lanes; then it is mended
where memory does not suffice: what frees memory is brought forward, or what needs it is put off. Random numbers are
integers, so that all machines draw the same. The rules of `pipefit.schedule.fit.kernels.sweep` about numba hold here,
too.
"""

from __future__ import annotations

from typing import Any

from pipefit.schedule.fit.kernels.sweep import INFINITE, evaluate_trial, sweep

EDGE = 8
"""Operations at each end of a stretch of the critical path that are worth moving."""


def draw(numbers: Any, below: int) -> int:
    """A random integer from 0 to below - 1 (Lehmer's generator; Park and Miller 1988)."""
    numbers[1] = numbers[1] * 48271 % 2147483647
    return int(numbers[1] % below)


def conflict(t: Any, one: int, other: int) -> bool:
    """Whether two operations of a lane must stay in their order."""
    return bool(t.stage[one] == t.stage[other] and (t.row[one] == t.row[other] or t.unit[one] == t.unit[other]))


def open_lane(s: Any, r: Any, lane: int) -> None:
    """Copy a lane of the state into the trial, if that has not been done."""
    if not r.changed[lane]:
        r.changed[lane] = True
        length = s.length[lane]
        r.length[lane] = length
        for place in range(length):
            r.order[lane, place] = s.order[lane, place]


def shift_operation(t: Any, r: Any, lane: int, at: int, to: int) -> int:
    """Move the operation at a place of the trial towards another one, as far as its own stage allows. Returns where it
    came to stand."""
    op = r.order[lane, at]
    step = 1 if to > at else -1
    while at != to:
        other = r.order[lane, at + step]
        if conflict(t, op, other):
            break
        r.order[lane, at] = other
        at += step
    r.order[lane, at] = op
    return at


def admit_operations(t: Any, s: Any, r: Any, lane: int, low: int, high: int) -> bool:
    """Put off what does not fit in memory until it does, from place `low` on, to `high` at least. Returns whether
    everything could be placed."""
    if t.limit[lane] >= INFINITE:
        return True
    length = r.length[lane]
    level = s.level[lane, low]
    queued = 0
    write = read = low
    while write < length:
        placed = -1
        for q in range(queued):
            op = r.queue[q]
            if level + t.need[op] <= t.limit[lane]:
                free = True
                for before in range(q):
                    if conflict(t, r.queue[before], op):
                        free = False
                        break
                if free:
                    placed = op
                    queued -= 1
                    for k in range(q, queued):
                        r.queue[k] = r.queue[k + 1]
                    break
        if placed < 0:
            if read >= length:
                return False
            op = r.order[lane, read]
            read += 1
            waits = level + t.need[op] > t.limit[lane]
            for q in range(queued):
                if conflict(t, r.queue[q], op):
                    waits = True
                    break
            if waits:
                if queued == len(r.queue):
                    return False
                r.queue[queued] = op
                queued += 1
                continue
            placed = op
        r.order[lane, write] = placed
        level += t.held[placed]
        write += 1
        if queued == 0 and read > high:
            break
    return True


def pull_freeing(t: Any, r: Any, lane: int, at: int, level: float) -> None:
    """Bring operations that free memory in front of place `at`, before which `level` is held, until what stands there
    fits."""
    op = r.order[lane, at]
    length = r.length[lane]
    tries = 0
    while level + t.need[op] > t.limit[lane] and tries < 3:
        tries += 1
        found = at + 1
        while found < length and t.held[r.order[lane, found]] >= 0.0:
            found += 1
        if found >= length:
            return
        freed = t.held[r.order[lane, found]]
        came = shift_operation(t, r, lane, found, at)
        if came > at:
            return
        level += freed
        at += 1


def idle_around(t: Any, s: Any, lane: int, at: int, reach: int) -> float:
    """The time for which a lane idles around a place."""
    low, high = max(at - reach, 0), min(at + reach, s.length[lane] - 1)
    return float(s.start[lane, high] - s.start[lane, low] - (s.done[lane, high] - s.done[lane, low]))


def choose_place(t: Any, s: Any, r: Any, lane: int) -> int:
    """A random place of a lane, rather one where the lane idles."""
    at = draw(r.numbers, s.length[lane])
    if draw(r.numbers, 4) < 3:
        other = draw(r.numbers, s.length[lane])
        if idle_around(t, s, lane, other, 6) > idle_around(t, s, lane, at, 6):
            at = other
    return at


def trace_path(t: Any, s: Any, r: Any) -> None:
    """Write down the critical path: from the end of the lane that takes longest, back to what each operation waits for,
    its lane or its data. Of a long stretch on one lane only both ends count: order within it changes nothing."""
    lane, most = 0, -1.0
    for other in range(len(s.length)):
        last = s.length[other] - 1
        end = s.start[other, last] + t.time[s.order[other, last]] - (s.start[other, 0] if t.span else 0.0)
        if end > most:
            lane, most = other, end
    at, count, stretch = s.length[lane] - 1, 0, 0
    while at >= 0:
        r.path[count, 0] = lane
        r.path[count, 1] = at
        count += 1
        op, start = s.order[lane, at], s.start[lane, at]
        if at and s.start[lane, at - 1] + t.time[s.order[lane, at - 1]] >= start:
            at -= 1
            continue
        at = -1
        if count - stretch > 2 * EDGE:
            for n in range(EDGE):
                r.path[stretch + EDGE + n, 0] = r.path[count - EDGE + n, 0]
                r.path[stretch + EDGE + n, 1] = r.path[count - EDGE + n, 1]
            count = stretch + 2 * EDGE
        stretch = count
        row, unit = t.row[op], t.unit[op]
        for k in range(t.in_first[row], t.in_first[row + 1]):
            if s.arrival[t.in_slot[k], unit] >= start:
                lane = t.row_lane[t.in_row[k]]
                at = s.position[t.in_row[k] * t.units + unit]
                break
    r.numbers[2] = count


def block_end(t: Any, s: Any, lane: int, at: int, step: int) -> int:
    """The last place that is reached from `at`, backwards or forwards, without idle time in between."""
    length = s.length[lane]
    while 0 <= at + step < length:
        first = min(at, at + step)
        if s.start[lane, first] + t.time[s.order[lane, first]] < s.start[lane, first + 1]:
            break
        at += step
    return at


def shift_critical(t: Any, s: Any, r: Any, reach: int) -> float:
    """A random operation of the critical path moves by up to `reach` places, or to an end of what its lane does without
    a pause. Returns the time from which things change, or -1."""
    entry = draw(r.numbers, r.numbers[2])
    lane, at = r.path[entry, 0], r.path[entry, 1]
    step = 1 if draw(r.numbers, 2) else -1
    if draw(r.numbers, 3) == 0:
        to = block_end(t, s, lane, at, step)
    else:
        to = min(max(at + step * (1 + draw(r.numbers, reach)), 0), s.length[lane] - 1)
    return shift_to(t, s, r, lane, at, to)


def shift_one(t: Any, s: Any, r: Any, lane: int, reach: int) -> float:
    """A random operation of a lane moves by up to `reach` places. Returns the time from which things change, or -1."""
    length = s.length[lane]
    at = choose_place(t, s, r, lane)
    by = 1 + draw(r.numbers, reach)
    to = max(at - by, 0) if draw(r.numbers, 2) else min(at + by, length - 1)
    return shift_to(t, s, r, lane, at, to)


def shift_to(t: Any, s: Any, r: Any, lane: int, at: int, to: int) -> float:
    """The operation at a place moves towards another. Returns the time from which things change, or -1."""
    pulls = draw(r.numbers, 2)
    open_lane(s, r, lane)
    came = shift_operation(t, r, lane, at, to)
    if came == at:
        return -1.0
    low = min(at, came)
    if pulls and came < at:
        pull_freeing(t, r, lane, came, s.level[lane, came])
    if not admit_operations(t, s, r, lane, low, max(at, came)):
        return -1.0
    return float(s.start[lane, low])


def shift_run(t: Any, s: Any, r: Any, lane: int) -> float:
    """A random row's operations of a run of units move by a few places, all the same way."""
    length = s.length[lane]
    row = t.row[s.order[lane, draw(r.numbers, length)]]
    first = draw(r.numbers, t.units)
    last = min(t.units, first + 2 + draw(r.numbers, t.units))
    by = 1 + draw(r.numbers, 3)
    later = draw(r.numbers, 2)
    open_lane(s, r, lane)
    low, high = length, 0
    count = 0
    for n in range(length):
        at = length - 1 - n if later else n
        op = r.order[lane, at]
        if t.row[op] != row or t.unit[op] < first or t.unit[op] >= last:
            continue
        came = shift_operation(t, r, lane, at, min(at + by, length - 1) if later else max(at - by, 0))
        if came != at:
            low, high = min(low, at, came), max(high, at, came)
            count += 1
    if not count or not admit_operations(t, s, r, lane, low, high):
        return -1.0
    return float(s.start[lane, low])


def shift_wave(t: Any, s: Any, r: Any) -> float:
    """The operations of one kind and one unit move on several lanes, the same way."""
    stages = len(t.row_lane) // 3
    kind = draw(r.numbers, 3)
    stage = draw(r.numbers, stages)
    count = 2 + draw(r.numbers, stages)
    unit = draw(r.numbers, t.units)
    by = 1 + draw(r.numbers, 3)
    later = draw(r.numbers, 2)
    since = INFINITE
    for one in range(stage, min(stage + count, stages)):
        node = (kind * stages + one) * t.units + unit
        at, lane = s.position[node], t.row_lane[one]
        if at >= s.length[lane] or t.node[s.order[lane, at]] != node or r.changed[lane]:
            continue  # a W that is part of a B, or a lane that has moved
        open_lane(s, r, lane)
        length = s.length[lane]
        came = shift_operation(t, r, lane, at, min(at + by, length - 1) if later else max(at - by, 0))
        if came == at:
            r.changed[lane] = False
            continue
        low = min(at, came)
        if not later:
            pull_freeing(t, r, lane, came, s.level[lane, came])
        if not admit_operations(t, s, r, lane, low, max(at, came)):
            return -1.0
        since = min(since, s.start[lane, low])
    return since if since < INFINITE else -1.0


def toggle_merge(t: Any, s: Any, r: Any, lane: int) -> float:
    """A random backward of a lane that runs as I and W runs as B from now on, or the other way round."""
    place = draw(r.numbers, s.length[lane])
    op = s.order[lane, place]
    stage, unit, stages = t.stage[op], t.unit[op], len(t.row_lane) // 3
    kind = op // (stages * t.units)
    if kind == 0 or not t.toggles[stage]:
        return -1.0
    open_lane(s, r, lane)
    length = r.length[lane]
    at = s.position[(stages + stage) * t.units + unit]
    if kind == 3:
        last = at
        for other in range(at + 1, length):
            one = r.order[lane, other]
            if t.row[one] == 2 * stages + stage and t.turn[t.unit[one]] < t.turn[unit]:
                last = other
        for other in range(length, last + 1, -1):
            r.order[lane, other] = r.order[lane, other - 1]
        r.order[lane, at] = (stages + stage) * t.units + unit
        r.order[lane, last + 1] = (2 * stages + stage) * t.units + unit
        r.length[lane] = length + 1
    else:
        gone = s.position[(2 * stages + stage) * t.units + unit]
        if kind == 2:
            at = shift_operation(t, r, lane, at, gone)
        for other in range(gone, length - 1):
            r.order[lane, other] = r.order[lane, other + 1]
        length -= 1
        r.length[lane] = length
        at = min(at, gone - 1)
        r.order[lane, at] = (3 * stages + stage) * t.units + unit
        at = s.position[(stages + stage) * t.units + unit]
    if not admit_operations(t, s, r, lane, at, r.length[lane]):
        return -1.0
    return float(s.start[lane, at])


def anneal(t: Any, s: Any, r: Any, best: Any, size: Any, heats: Any, settings: Any, moves: int) -> int:
    """Try `moves` random changes of the orders in `s`, keeping those that cost no more than a random part of the heat,
    which falls from `heats[0]` to `heats[1]`. The best orders go into `best`, with their lengths in `size`.
    `settings`: weight of the sum of ends, best value so far, and of a hundred moves, how many are a toggle, a shift of
    one or before, of a run or before; the reach of a shift; of a hundred shifts of one, how many are on the critical
    path. Returns how many were kept."""
    lanes = len(s.length)
    weight = settings[0]
    heat = heats[0]
    kept = 0
    current = s.value[0] + weight * s.value[1]
    floor = 0.0
    for lane in range(lanes):
        floor += t.work[lane]
    trace_path(t, s, r)
    for _ in range(moves):
        heat *= heats[2]
        for lane in range(lanes):
            r.changed[lane] = False
        which = draw(r.numbers, 100)
        lane = draw(r.numbers, lanes)
        if which < settings[2]:
            since = toggle_merge(t, s, r, lane)
        elif which < settings[3]:
            if draw(r.numbers, 100) < settings[6]:
                since = shift_critical(t, s, r, int(settings[5]))
            else:
                since = shift_one(t, s, r, lane, int(settings[5]))
        elif which < settings[4]:
            since = shift_run(t, s, r, lane)
        else:
            since = shift_wave(t, s, r)
        if since < 0.0:
            continue
        for lane in range(lanes):
            if r.changed[lane]:
                total = 0.0
                for place in range(r.length[lane]):
                    total += t.time[r.order[lane, place]]
                r.left[lanes + lane] = total
        u = draw(r.numbers, 1 << 20) / 1048576.0
        most = current + 3.0 * heat * u * u
        if not evaluate_trial(t, s, r, most - weight * floor, since):
            continue
        value = r.value[0] + weight * r.value[1]
        if value > most:
            continue
        kept += 1
        for lane in range(lanes):
            if r.changed[lane]:
                s.length[lane] = r.length[lane]
                for place in range(r.length[lane]):
                    s.order[lane, place] = r.order[lane, place]
        sweep(t, s)
        trace_path(t, s, r)
        current = s.value[0] + weight * s.value[1]
        if current < settings[1]:
            settings[1] = current
            for lane in range(lanes):
                size[lane] = s.length[lane]
                for place in range(s.length[lane]):
                    best[lane, place] = s.order[lane, place]
    heats[0] = heat
    return kept
