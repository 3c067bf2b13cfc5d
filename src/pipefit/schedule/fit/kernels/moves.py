"""The inner loop of the local search: random changes of orders, accepted if they cost little.

A change moves operations within their lanes: one operation, a run of one row, or a wave over several lanes. If memory
is then exceeded, the change is repaired: operations that free memory are moved forward, or operations that need it are
delayed. Random numbers are integers, so that all machines draw the same ones. The rules of
`pipefit.schedule.fit.kernels.sweep` about numba apply here, too.
"""

from __future__ import annotations

from typing import Any

from pipefit.schedule.fit.kernels.sweep import INFINITE, evaluate_trial, sweep

EDGE = 8
"""Operations at each end of a lane's stretch of the critical path that are candidates for moves."""


def draw(numbers: Any, below: int) -> int:
    """Return a random integer from 0 to below - 1 (Lehmer's generator; Park and Miller 1988)."""
    numbers[1] = numbers[1] * 48271 % 2147483647
    return int(numbers[1] % below)


def conflict(t: Any, one: int, other: int) -> bool:
    """Return whether two operations of a lane must stay in their order."""
    return bool(t.stage[one] == t.stage[other] and (t.row[one] == t.row[other] or t.unit[one] == t.unit[other]))


def open_lane(s: Any, r: Any, lane: int) -> None:
    """Copy a lane of the state into the trial, if not done yet."""
    if not r.changed[lane]:
        r.changed[lane] = True
        length = s.length[lane]
        r.length[lane] = length
        for position in range(length):
            r.order[lane, position] = s.order[lane, position]


def shift_operation(t: Any, r: Any, lane: int, at: int, to: int) -> int:
    """Move the operation at a position of the trial towards another position, as far as its own stage allows.

    Returns its new position.
    """
    op = r.order[lane, at]
    step = 1 if to > at else -1
    while at != to:
        neighbour = r.order[lane, at + step]
        if conflict(t, op, neighbour):
            break
        r.order[lane, at] = neighbour
        at += step
    r.order[lane, at] = op
    return at


def admit_operations(t: Any, s: Any, r: Any, lane: int, low: int, high: int) -> bool:
    """Delay operations that do not fit in memory until they do, from position `low` on, to `high` at least.

    Returns whether all operations could be placed.
    """
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
    """Move operations that free memory before position `at` until the operation there fits.

    `level` is the memory held before that position.
    """
    op = r.order[lane, at]
    length = r.length[lane]
    tries = 0
    while level + t.need[op] > t.limit[lane] and tries < 3:
        tries += 1
        freeing = at + 1
        while freeing < length and t.held[r.order[lane, freeing]] >= 0.0:
            freeing += 1
        if freeing >= length:
            return
        freed = t.held[r.order[lane, freeing]]
        came = shift_operation(t, r, lane, freeing, at)
        if came > at:
            return
        level += freed
        at += 1


def idle_around(t: Any, s: Any, lane: int, at: int, reach: int) -> float:
    """Return the idle time of a lane around a position."""
    low, high = max(at - reach, 0), min(at + reach, s.length[lane] - 1)
    return float(s.start[lane, high] - s.start[lane, low] - (s.done[lane, high] - s.done[lane, low]))


def choose_place(t: Any, s: Any, r: Any, lane: int) -> int:
    """Return a random position of a lane, with a preference for idle times."""
    position = draw(r.numbers, s.length[lane])
    if draw(r.numbers, 4) < 3:
        rival = draw(r.numbers, s.length[lane])
        if idle_around(t, s, lane, rival, 6) > idle_around(t, s, lane, position, 6):
            position = rival
    return position


def trace_path(t: Any, s: Any, r: Any) -> None:
    """Record the critical path: from the end of the slowest lane back to the operation or data that each operation
    waits for.

    Only both ends of a long stretch on one lane are recorded, because the order within it changes nothing.
    """
    lane, latest = 0, -1.0
    for candidate in range(len(s.length)):
        last = s.length[candidate] - 1
        end = s.start[candidate, last] + t.time[s.order[candidate, last]] - (s.start[candidate, 0] if t.span else 0.0)
        if end > latest:
            lane, latest = candidate, end
    position, count, stretch = s.length[lane] - 1, 0, 0
    while position >= 0:
        r.path[count, 0] = lane
        r.path[count, 1] = position
        count += 1
        op, start = s.order[lane, position], s.start[lane, position]
        if position and s.start[lane, position - 1] + t.time[s.order[lane, position - 1]] >= start:
            position -= 1
            continue
        position = -1
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
                position = s.position[t.in_row[k] * t.units + unit]
                break
    r.numbers[2] = count


def block_end(t: Any, s: Any, lane: int, at: int, step: int) -> int:
    """Return the last position reached from `at`, backwards or forwards, without idle time in between."""
    length = s.length[lane]
    while 0 <= at + step < length:
        first = min(at, at + step)
        if s.start[lane, first] + t.time[s.order[lane, first]] < s.start[lane, first + 1]:
            break
        at += step
    return at


def shift_critical(t: Any, s: Any, r: Any, reach: int) -> float:
    """Move a random operation of the critical path by up to `reach` positions, or to an end of its lane's busy period.

    Returns the time from which the schedule changes, or -1.
    """
    entry = draw(r.numbers, r.numbers[2])
    lane, position = r.path[entry, 0], r.path[entry, 1]
    step = 1 if draw(r.numbers, 2) else -1
    if draw(r.numbers, 3) == 0:
        to = block_end(t, s, lane, position, step)
    else:
        to = min(max(position + step * (1 + draw(r.numbers, reach)), 0), s.length[lane] - 1)
    return shift_to(t, s, r, lane, position, to)


def shift_one(t: Any, s: Any, r: Any, lane: int, reach: int) -> float:
    """Move a random operation of a lane by up to `reach` positions. Returns the time from which the schedule changes,
    or -1."""
    length = s.length[lane]
    position = choose_place(t, s, r, lane)
    by = 1 + draw(r.numbers, reach)
    to = max(position - by, 0) if draw(r.numbers, 2) else min(position + by, length - 1)
    return shift_to(t, s, r, lane, position, to)


def shift_to(t: Any, s: Any, r: Any, lane: int, at: int, to: int) -> float:
    """Move the operation at a position towards another position. Returns the time from which the schedule changes, or
    -1."""
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
    """Move a random row's operations of a run of units by a few positions in one direction."""
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
        position = length - 1 - n if later else n
        op = r.order[lane, position]
        if t.row[op] != row or t.unit[op] < first or t.unit[op] >= last:
            continue
        came = shift_operation(t, r, lane, position, min(position + by, length - 1) if later else max(position - by, 0))
        if came != position:
            low, high = min(low, position, came), max(high, position, came)
            count += 1
    if not count or not admit_operations(t, s, r, lane, low, high):
        return -1.0
    return float(s.start[lane, low])


def shift_wave(t: Any, s: Any, r: Any) -> float:
    """Move the operations of one kind and one unit on several lanes in one direction."""
    stages = len(t.row_lane) // 3
    kind = draw(r.numbers, 3)
    stage = draw(r.numbers, stages)
    count = 2 + draw(r.numbers, stages)
    unit = draw(r.numbers, t.units)
    by = 1 + draw(r.numbers, 3)
    later = draw(r.numbers, 2)
    since = INFINITE
    for wave_stage in range(stage, min(stage + count, stages)):
        node = (kind * stages + wave_stage) * t.units + unit
        position, lane = s.position[node], t.row_lane[wave_stage]
        if position >= s.length[lane] or t.node[s.order[lane, position]] != node or r.changed[lane]:
            continue  # a W that is part of a B, or a lane that has changed already
        open_lane(s, r, lane)
        length = s.length[lane]
        came = shift_operation(t, r, lane, position, min(position + by, length - 1) if later else max(position - by, 0))
        if came == position:
            r.changed[lane] = False
            continue
        low = min(position, came)
        if not later:
            pull_freeing(t, r, lane, came, s.level[lane, came])
        if not admit_operations(t, s, r, lane, low, max(position, came)):
            return -1.0
        since = min(since, s.start[lane, low])
    return since if since < INFINITE else -1.0


def toggle_merge(t: Any, s: Any, r: Any, lane: int) -> float:
    """Merge a random I and W of a lane into a B, or split a random B into I and W."""
    chosen = draw(r.numbers, s.length[lane])
    op = s.order[lane, chosen]
    stage, unit, stages = t.stage[op], t.unit[op], len(t.row_lane) // 3
    kind = op // (stages * t.units)
    if kind == 0 or not t.toggles[stage]:
        return -1.0
    open_lane(s, r, lane)
    length = r.length[lane]
    position = s.position[(stages + stage) * t.units + unit]
    if kind == 3:
        last = position
        for index in range(position + 1, length):
            later_op = r.order[lane, index]
            if t.row[later_op] == 2 * stages + stage and t.turn[t.unit[later_op]] < t.turn[unit]:
                last = index
        for index in range(length, last + 1, -1):
            r.order[lane, index] = r.order[lane, index - 1]
        r.order[lane, position] = (stages + stage) * t.units + unit
        r.order[lane, last + 1] = (2 * stages + stage) * t.units + unit
        r.length[lane] = length + 1
    else:
        gone = s.position[(2 * stages + stage) * t.units + unit]
        if kind == 2:
            position = shift_operation(t, r, lane, position, gone)
        for index in range(gone, length - 1):
            r.order[lane, index] = r.order[lane, index + 1]
        length -= 1
        r.length[lane] = length
        position = min(position, gone - 1)
        r.order[lane, position] = (3 * stages + stage) * t.units + unit
        position = s.position[(stages + stage) * t.units + unit]
    if not admit_operations(t, s, r, lane, position, r.length[lane]):
        return -1.0
    return float(s.start[lane, position])


def anneal(t: Any, s: Any, r: Any, best: Any, size: Any, heats: Any, settings: Any, moves: int) -> int:
    """Try `moves` random changes of the orders in `s`, and return the number of accepted ones.

    A change is accepted if it costs no more than a random part of the heat, which falls from `heats[0]` to `heats[1]`.
    The best orders go into `best`, with their lengths in `size`. `settings`: the weight of the sum of ends; the best
    value so far; cumulative percentages of moves: toggles, shifts of one operation, shifts of a run; the reach of a
    shift; the percentage of shifts of one operation that are on the critical path.
    """
    lanes = len(s.length)
    weight = settings[0]
    heat = heats[0]
    accepted = 0
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
                for position in range(r.length[lane]):
                    total += t.time[r.order[lane, position]]
                r.left[lanes + lane] = total
        u = draw(r.numbers, 1 << 20) / 1048576.0
        limit = current + 3.0 * heat * u * u
        if not evaluate_trial(t, s, r, limit - weight * floor, since):
            continue
        value = r.value[0] + weight * r.value[1]
        if value > limit:
            continue
        accepted += 1
        for lane in range(lanes):
            if r.changed[lane]:
                s.length[lane] = r.length[lane]
                for position in range(r.length[lane]):
                    s.order[lane, position] = r.order[lane, position]
        sweep(t, s)
        trace_path(t, s, r)
        current = s.value[0] + weight * s.value[1]
        if current < settings[1]:
            settings[1] = current
            for lane in range(lanes):
                size[lane] = s.length[lane]
                for position in range(s.length[lane]):
                    best[lane, position] = s.order[lane, position]
    heats[0] = heat
    return accepted
