"""The inner loop of the evaluator where transfers share ports: events in time order, rates fair to every message.

A fluid model: each active transfer moves at a rate between 0 and 1 of what it reaches alone, and rates change only
when a transfer begins or ends. On a port that is asked for more than it has, all messages get equal bytes a second;
what one of them cannot use goes to the others (max-min fairness by progressive filling: Bertsekas and Gallager 1992,
6.5.2). Transfers of one queue take turns. Written once, as `kernel.sweep_tasks` is: plain Python or numba, equal bits,
and the bits of the sweep where nothing is shared.
"""

from __future__ import annotations

from typing import Any


def share_ports(
    first: Any, then: Any, waits: Any, duration: Any, transit: Any, rank: Any, flow: Any, first_port: Any, port: Any,
    use: Any, weight: Any, queue: Any, start: Any, moment: Any, ready: Any, left: Any, rate: Any, since: Any,
    finish: Any, fresh: Any, behind: Any, stack: Any, pending: Any, active: Any, ends_at: Any, group: Any, spot: Any,
    marked: Any, room: Any, asked: Any, busy: Any, tail: Any, users: Any,
) -> int:  # fmt: skip
    """Fill `start` and `moment` as `kernel.sweep_tasks` does; returns how many tasks ran (fewer than all: a circle).

    `then[first[t]:first[t + 1]]` are the waits that hang on task t: 2 x (task that waits) + (0: on its stop, 1: on its
    arrival); `waits[t]` counts those of t, and is used up. At one moment the lowest `rank` goes first. `flow[t]` is -1
    for a task that shares nothing, else an index into the flows: flow f loads `port[first_port[f]:first_port[f + 1]]`
    by `use`, its rate counts `weight[f]` (seconds a byte of one message) and it takes its turn in `queue[f]` (-1:
    none). The rest is scratch space: with an entry a task, `ready` 0, `rate` 1, `finish` and `behind` -1 (`ends_at[i]`
    is the finish of the i-th active transfer: side by side, they are looked through fast); with an entry a port
    `marked`, `users` 0, `room`, `asked`; with an entry a queue `busy` and `tail` -1.
    """
    done = depth = waiting = running = stamp = 0  # `pending` is a binary heap by (ready, rank)
    for task in range(len(flow)):
        if waits[task] == 0:
            stack[depth] = task
            depth += 1
    while True:
        # 1. All that needs no port, as far as it goes.
        while depth > 0:
            depth -= 1
            task = stack[depth]
            if flow[task] >= 0 and finish[task] < 0.0:
                at = waiting
                waiting += 1
                while at > 0:
                    other = pending[(at - 1) // 2]
                    if ready[other] < ready[task] or (ready[other] == ready[task] and rank[other] < rank[task]):
                        break
                    pending[at] = other
                    at = (at - 1) // 2
                pending[at] = task
                continue
            if flow[task] < 0:
                start[task] = ready[task]
                moment[2 * task] = ready[task] + duration[task]
                moment[2 * task + 1] = ready[task] + transit[task]
            done += 1
            for entry in range(first[task], first[task + 1]):
                other = then[entry] // 2
                come = moment[2 * task + then[entry] % 2]
                if come > ready[other]:
                    ready[other] = come
                waits[other] -= 1
                if waits[other] == 0:
                    stack[depth] = other
                    depth += 1
        # 2. The next event: the end of a transfer before the beginning of another, then by rank.
        best, ends = -1, False
        for index in range(running):
            if best < 0 or ends_at[index] < ends_at[best] or (
                ends_at[index] == ends_at[best] and rank[active[index]] < rank[active[best]]
            ):  # fmt: skip
                best, ends = index, True
        if waiting > 0 and (best < 0 or ready[pending[0]] < ends_at[best]):
            best, ends = 0, False
        if best < 0:
            return done
        stamp += 1
        begins, crowded = -1, False
        if ends:
            task = active[best]
            now = finish[task]
            running -= 1
            active[best] = active[running]
            ends_at[best] = ends_at[running]
            moment[2 * task] = now
            moment[2 * task + 1] = now + (transit[task] - duration[task])
            if now == start[task] + duration[task]:
                moment[2 * task + 1] = start[task] + transit[task]
            stack[depth] = task
            depth += 1
            line = queue[flow[task]]
            if line >= 0:
                begins = behind[task]
                busy[line] = begins
                if begins < 0:
                    tail[line] = -1
            for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                marked[port[entry]] = stamp
                users[port[entry]] -= 1
                crowded = crowded or users[port[entry]] > 0
        else:
            task = pending[0]
            now = ready[task]
            waiting -= 1
            moved, at = pending[waiting], 0
            while 2 * at + 1 < waiting:
                below = 2 * at + 1
                if below + 1 < waiting:
                    one, other = pending[below], pending[below + 1]
                    if ready[other] < ready[one] or (ready[other] == ready[one] and rank[other] < rank[one]):
                        below += 1
                other = pending[below]
                if ready[moved] < ready[other] or (ready[moved] == ready[other] and rank[moved] < rank[other]):
                    break
                pending[at] = other
                at = below
            pending[at] = moved
            line = queue[flow[task]]
            if line >= 0 and busy[line] >= 0:
                behind[tail[line]] = task
                tail[line] = task
                continue
            if line >= 0:
                busy[line] = task
                tail[line] = task
            begins = task
        if begins >= 0:
            start[begins] = now
            left[begins] = duration[begins]
            since[begins] = now
            finish[begins] = now + duration[begins]
            active[running] = begins
            ends_at[running] = finish[begins]
            running += 1
            for entry in range(first_port[flow[begins]], first_port[flow[begins] + 1]):
                marked[port[entry]] = stamp
                users[port[entry]] += 1
                crowded = crowded or users[port[entry]] > 1
        if not crowded:
            continue
        # 3. New rates for all that hangs together with what has changed.
        grows = True
        while grows:
            grows = False
            for index in range(running):
                task = active[index]
                touched = False
                for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                    touched = touched or marked[port[entry]] == stamp
                if touched:
                    for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                        if marked[port[entry]] != stamp:
                            marked[port[entry]] = stamp
                            grows = True
        members = 0
        for index in range(running):
            task = active[index]
            touched = False
            for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                touched = touched or marked[port[entry]] == stamp
            if touched:
                for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                    room[port[entry]] = 1.0
                fresh[task] = -1.0
                group[members] = task
                spot[members] = index
                members += 1
        open_flows = members
        while open_flows > 0:
            for index in range(members):
                task = group[index]
                for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                    asked[port[entry]] = 0.0
            least, tight = -1.0, -1
            for index in range(members):
                task = group[index]
                if fresh[task] < 0.0:
                    for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                        asked[port[entry]] += use[entry] * weight[flow[task]]
                    if least < 0.0 or 1.0 / weight[flow[task]] < least:
                        least = 1.0 / weight[flow[task]]
            for index in range(members):
                task = group[index]
                if fresh[task] < 0.0:
                    for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                        level = room[port[entry]] / asked[port[entry]]
                        if level < least * (1.0 - 1e-9):
                            least, tight = level, port[entry]
            for index in range(members):
                task = group[index]
                if fresh[task] >= 0.0:
                    continue
                chosen = tight < 0 and 1.0 / weight[flow[task]] <= least
                for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                    chosen = chosen or port[entry] == tight
                if chosen:
                    fresh[task] = min(1.0, max(least, 0.0) * weight[flow[task]]) if tight >= 0 else 1.0
                    fresh[task] = max(fresh[task], 1e-9)
                    open_flows -= 1
                    for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                        room[port[entry]] = max(0.0, room[port[entry]] - use[entry] * fresh[task])
        for index in range(members):
            task = group[index]
            if fresh[task] != rate[task]:
                left[task] = max(0.0, left[task] - (now - since[task]) * rate[task])
                since[task] = now
                rate[task] = fresh[task]
                finish[task] = now + left[task] / rate[task]
                ends_at[spot[index]] = finish[task]
