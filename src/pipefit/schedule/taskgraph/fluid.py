"""The inner loop of the evaluator with shared ports: events in time order, with fair rates for all messages.

It is a fluid model: each active transfer moves at a rate between 0 and 1 of its uncontended rate, and rates change only
when a transfer begins or ends. On a port with more demand than capacity, all messages get equal bytes per second;
capacity that one message cannot use goes to the other messages (max-min fairness by progressive filling: Bertsekas and
Gallager 1992, 6.5.2). Transfers of one queue take turns. The code runs as plain Python or numba with equal bits, as
`kernel.sweep_tasks` does. Without sharing, the result has the bits of the sweep.
"""

from __future__ import annotations

from typing import Any


def share_ports(
    first: Any, then: Any, waits: Any, duration: Any, transit: Any, rank: Any, flow: Any, first_port: Any, port: Any,
    use: Any, weight: Any, queue: Any, start: Any, moment: Any, ready: Any, left: Any, rate: Any, since: Any,
    finish: Any, fresh: Any, behind: Any, stack: Any, pending: Any, active: Any, ends_at: Any, group: Any, spot: Any,
    marked: Any, room: Any, asked: Any, busy: Any, tail: Any, users: Any,
) -> int:  # fmt: skip
    """Fill `start` and `moment` as `kernel.sweep_tasks` does, and return the number of tasks that ran.

    Fewer than all tasks run if the dependencies have a cycle. `then[first[t]:first[t + 1]]` are the dependents of task
    t: 2 x (waiting task) + (0: for its stop, 1: for its arrival). `waits[t]` is the number of open dependencies of t
    and is counted down. Simultaneous events are ordered by `rank`.

    `flow[t]` is -1 for a task that shares nothing, else an index into the flows. Flow f loads the ports
    `port[first_port[f]:first_port[f + 1]]` by `use`; `weight[f]` are its seconds per byte of one message; `queue[f]` is
    the queue in which it takes turns (-1: none).

    The other arrays are scratch space. With an entry per task: `ready` 0, `rate` 1, `finish` and `behind` -1;
    `ends_at[i]` is the finish of the i-th active transfer, contiguous for fast scans. With an entry per port: `marked`
    and `users` 0, `room`, `asked`. With an entry per queue: `busy` and `tail` -1.
    """
    done = depth = waiting = running = stamp = 0  # `pending` is a binary heap by (ready, rank)
    for task in range(len(flow)):
        if waits[task] == 0:
            stack[depth] = task
            depth += 1
    while True:
        # 1. Run all tasks that need no port and have no open dependency.
        while depth > 0:
            depth -= 1
            task = stack[depth]
            if flow[task] >= 0 and finish[task] < 0.0:
                heap_index = waiting
                waiting += 1
                while heap_index > 0:
                    other_task = pending[(heap_index - 1) // 2]
                    if ready[other_task] < ready[task] or (
                        ready[other_task] == ready[task] and rank[other_task] < rank[task]
                    ):
                        break
                    pending[heap_index] = other_task
                    heap_index = (heap_index - 1) // 2
                pending[heap_index] = task
                continue
            if flow[task] < 0:
                start[task] = ready[task]
                moment[2 * task] = ready[task] + duration[task]
                moment[2 * task + 1] = ready[task] + transit[task]
            done += 1
            for entry in range(first[task], first[task + 1]):
                other_task = then[entry] // 2
                come = moment[2 * task + then[entry] % 2]
                if come > ready[other_task]:
                    ready[other_task] = come
                waits[other_task] -= 1
                if waits[other_task] == 0:
                    stack[depth] = other_task
                    depth += 1
        # 2. The next event; at equal times the end of a transfer precedes the beginning of another, then by rank.
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
            moved, heap_index = pending[waiting], 0
            while 2 * heap_index + 1 < waiting:
                below = 2 * heap_index + 1
                if below + 1 < waiting:
                    left_child, other_task = pending[below], pending[below + 1]
                    if ready[other_task] < ready[left_child] or (
                        ready[other_task] == ready[left_child] and rank[other_task] < rank[left_child]
                    ):
                        below += 1
                other_task = pending[below]
                if ready[moved] < ready[other_task] or (
                    ready[moved] == ready[other_task] and rank[moved] < rank[other_task]
                ):
                    break
                pending[heap_index] = other_task
                heap_index = below
            pending[heap_index] = moved
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
        # 3. New rates for all transfers connected, by shared ports, with the transfer that began or ended.
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
