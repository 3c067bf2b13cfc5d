"""The inner loops of fitting: the times of given orders, in full or only after a change.

They run as plain Python and under numba with equal results: times are only added and compared, in one order. The rules
of time are those of `pipefit.schedule.taskgraph.compile`; tests compare both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

INFINITE = 1e300


class InstanceTables(NamedTuple):
    """An instance for the loops.

    A **node** is the forward, the backward or the W of a stage and unit: (kind * stages + stage) * units + unit, with a
    B under I. A **row** is a node without its unit; a **slot** is one direction of one edge.
    """

    lane: Any
    "[operation], as the next seven fields."
    stage: Any
    unit: Any
    row: Any
    node: Any
    time: Any
    held: Any
    need: Any
    "Memory that must be free when it starts."
    row_lane: Any
    in_first: Any
    "[row + 1]: the producers of a row are `in_slot[in_first[row]:in_first[row + 1]]`."
    in_slot: Any
    in_row: Any
    out_first: Any
    "[row + 1]: the slots of a row, in the order of sending."
    out_row: Any
    "[slot]: the row that uses it."
    crosses: Any
    "[slot]: whether it leads to another lane."
    whole: Any
    "[slot, unit]"
    port: Any
    limit: Any
    "[lane]"
    turn: Any
    "[unit]: its position in the order of backwards."
    toggles: Any
    "[stage]: whether its backwards may run both as B and as I and W."
    work: Any
    "[lane]: the time of its operations, with each backward in its quicker form; for bounds."
    units: int
    span: bool


class OrderState(NamedTuple):
    """Orders with their times; only the first `length` entries of a lane count."""

    order: Any
    "[lane, position]: the operation."
    length: Any
    start: Any
    "[lane, position]"
    done: Any
    "[lane, position]: the work of the lane up to and including this position."
    sent: Any
    "[lane, position]: the time at which the port has sent everything up to this position."
    begin: Any
    "[node]: its start."
    position: Any
    "[node]: its position on its lane."
    level: Any
    "[lane, position]: the memory held before it."
    arrival: Any
    "[slot, unit]: the time at which the consumer can use it."
    value: Any
    "[main objective, sum of the lanes' ends]"
    place: Any
    "[lane]: scratch, as the next two fields."
    free: Any
    port: Any


class OrderTrial(NamedTuple):
    """Changed orders under evaluation: as `OrderState`, for the part that must be evaluated again."""

    order: Any
    length: Any
    changed: Any
    "[lane]: whether `order` differs from the state's; otherwise the state's order is valid."
    stamp: Any
    "[node]: the number of the last evaluation that reached it."
    arrival: Any
    place: Any
    "[lane]: the current position of the evaluation."
    free: Any
    ported: Any
    first: Any
    "[lane]: start of its first operation."
    left: Any
    waiting: Any
    "[lane]: the node that it waits for, or -1."
    stack: Any
    numbers: Any
    "[evaluations so far, random state, length of the path]"
    path: Any
    "[n, 2]: lane and position of the operations of the critical path, last first."
    value: Any
    queue: Any
    "Operations that wait for memory."


def sweep(t: Any, s: Any) -> bool:
    """Fill in all times of a state. Returns whether its orders can run to their ends."""
    lanes = len(s.length)
    for node in range(len(s.begin)):
        s.begin[node] = INFINITE
    cursor, free, port = s.place, s.free, s.port
    for lane in range(lanes):
        cursor[lane] = 0
        free[lane] = port[lane] = 0.0
    moved = True
    while moved:
        moved = False
        for lane in range(lanes):
            while cursor[lane] < s.length[lane]:
                position = cursor[lane]
                op = s.order[lane, position]
                row, unit = t.row[op], t.unit[op]
                time = free[lane]
                ready = True
                for k in range(t.in_first[row], t.in_first[row + 1]):
                    if s.begin[t.in_row[k] * t.units + unit] >= INFINITE:
                        ready = False
                        break
                    time = max(time, s.arrival[t.in_slot[k], unit])
                if not ready:
                    break
                moved = True
                stop = time + t.time[op]
                s.start[lane, position] = time
                s.begin[t.node[op]] = time
                s.position[t.node[op]] = position
                s.level[lane, position + 1] = s.level[lane, position] + t.held[op]
                s.done[lane, position] = t.time[op] + (s.done[lane, position - 1] if position else 0.0)
                free[lane] = stop
                for slot in range(t.out_first[row], t.out_first[row + 1]):
                    if t.crosses[slot]:
                        sent = max(stop, port[lane])
                        port[lane] = sent + t.port[slot, unit]
                        s.arrival[slot, unit] = sent + t.whole[slot, unit]
                    else:
                        s.arrival[slot, unit] = stop
                s.sent[lane, position] = port[lane]
                cursor[lane] = position + 1
    main = total = 0.0
    for lane in range(lanes):
        if cursor[lane] < s.length[lane]:
            return False
        begin = s.start[lane, 0] if t.span else 0.0
        main = max(main, free[lane] - begin)
        total += free[lane] - begin
    s.value[0] = main
    s.value[1] = total
    return True


def evaluate_trial(t: Any, s: Any, r: Any, most: float, since: float) -> bool:
    """Evaluate the trial's orders, only from the operations that start at `since` or later in the state.

    Returns False if they cannot run, or as soon as the main objective is known to exceed `most`.
    """
    lanes = len(s.length)
    number = r.numbers[0] + 1
    r.numbers[0] = number
    depth = 0
    for lane in range(lanes):
        low, high = 0, s.length[lane]
        while low < high:
            middle = (low + high) // 2
            if s.start[lane, middle] < since:
                low = middle + 1
            else:
                high = middle
        r.place[lane] = low
        r.waiting[lane] = -1
        if low:
            before = s.order[lane, low - 1]
            r.free[lane] = s.start[lane, low - 1] + t.time[before]
            r.ported[lane] = s.sent[lane, low - 1]
            r.first[lane] = s.start[lane, 0]
        else:
            r.free[lane] = r.ported[lane] = 0.0
            r.first[lane] = INFINITE
        length = r.length[lane] if r.changed[lane] else s.length[lane]
        r.left[lane] = (r.left[lanes + lane] if r.changed[lane] else s.done[lane, length - 1]) - (
            s.done[lane, low - 1] if low else 0.0
        )
        r.stack[depth] = lane
        depth += 1
    finished = 0
    while depth:
        depth -= 1
        lane = r.stack[depth]
        changed = r.changed[lane]
        length = r.length[lane] if changed else s.length[lane]
        position, free, ported, left = r.place[lane], r.free[lane], r.ported[lane], r.left[lane]
        r.waiting[lane] = -1
        while position < length:
            op = r.order[lane, position] if changed else s.order[lane, position]
            row, unit = t.row[op], t.unit[op]
            time = free
            lacks = -1
            for k in range(t.in_first[row], t.in_first[row + 1]):
                node = t.in_row[k] * t.units + unit
                if s.begin[node] < since:
                    time = max(time, s.arrival[t.in_slot[k], unit])
                elif r.stamp[node] == number:
                    time = max(time, r.arrival[t.in_slot[k], unit])
                else:
                    lacks = node
                    break
            if lacks >= 0:
                r.waiting[lane] = lacks
                break
            if position == 0:
                r.first[lane] = time
            if time + left - (r.first[lane] if t.span else 0.0) > most:
                return False
            stop = time + t.time[op]
            left -= t.time[op]
            node = t.node[op]
            r.stamp[node] = number
            free = stop
            for slot in range(t.out_first[row], t.out_first[row + 1]):
                if t.crosses[slot]:
                    sent = max(stop, ported)
                    ported = sent + t.port[slot, unit]
                    r.arrival[slot, unit] = sent + t.whole[slot, unit]
                    target_lane = t.row_lane[t.out_row[slot]]
                    if r.waiting[target_lane] == node:
                        r.waiting[target_lane] = -1
                        r.stack[depth] = target_lane
                        depth += 1
                else:
                    r.arrival[slot, unit] = stop
            position += 1
        r.place[lane], r.free[lane], r.ported[lane], r.left[lane] = position, free, ported, left
        if position == length:
            finished += 1
    if finished < lanes:
        return False
    main = total = 0.0
    for lane in range(lanes):
        end = r.free[lane] - (r.first[lane] if t.span else 0.0)
        main = max(main, end)
        total += end
    r.value[0] = main
    r.value[1] = total
    return True
