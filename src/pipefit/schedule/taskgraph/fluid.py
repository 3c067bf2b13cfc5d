"""The inner loop of the evaluator with shared ports: events in time order, with fair rates for all messages.

It is a fluid model: each active transfer moves at a rate between 0 and 1 of its uncontended rate, and rates change only
when a transfer begins or ends. On a port with more demand than capacity, all messages get equal bytes per second;
capacity that one message cannot use goes to the other messages (max-min fairness by progressive filling: Bertsekas and
Gallager 1992, 6.5.2). Transfers of one queue take turns. The code runs as plain Python or numba with equal bits, as
`kernel.sweep_tasks` does. Without sharing, the result has the bits of the sweep.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class SharedTasks(NamedTuple):
    """Tasks and transfers: lists in plain Python, arrays for numba; an entry per task unless noted."""

    first: Any
    "`then[first[t]:first[t + 1]]` are the dependents of task t."
    then: Any
    "2 x (waiting task) + (0: for the stop, 1: for the arrival of the other)."
    waits: Any
    "Number of open dependencies; it is counted down."
    duration: Any
    transit: Any
    rank: Any
    "Order of simultaneous events."
    flow: Any
    "Index into the flows; -1 for a task that shares nothing."
    start: Any
    "Result: the start of every task."
    moment: Any
    "Result: [2 x task] its stop, [2 x task + 1] its arrival."
    ready: Any
    "Scratch, 0: latest moment that a task waits for."
    left: Any
    "Scratch: seconds left at full rate."
    rate: Any
    "Scratch, 1: present rate."
    since: Any
    "Scratch: time from which `left` and `rate` hold."
    finish: Any
    "Scratch, -1: end of the transfer at its present rate."
    fresh: Any
    "Scratch: the next rate."
    behind: Any
    "Scratch, -1: next transfer in the queue."
    stack: Any
    "Scratch: tasks without open dependencies."
    pending: Any
    "Scratch: binary heap, by (ready, rank), of transfers that may begin."


class SharedFlows(NamedTuple):
    """The ports, by flow, that the transfers load."""

    first_port: Any
    "Flow f loads the ports `port[first_port[f]:first_port[f + 1]]`."
    port: Any
    use: Any
    "The load of each of these ports."
    weight: Any
    "[flow]: seconds per byte of one message."
    queue: Any
    "[flow]: the queue in which it takes turns; -1: none."
    busy: Any
    "Scratch, [queue], -1: the active transfer."
    tail: Any
    "Scratch, [queue], -1: the last transfer."
    marked: Any
    "Scratch, [port], 0: the last event that changed its rates."
    room: Any
    "Scratch, [port]: capacity left."
    asked: Any
    "Scratch, [port]: load of the transfers without a rate."
    users: Any
    "Scratch, [port], 0: number of active transfers."


class ActiveTransfers(NamedTuple):
    """Scratch: the active transfers, and those among them that get new rates."""

    task: Any
    ends_at: Any
    "Finish of each active transfer, contiguous for fast scans."
    group: Any
    "The transfers that get new rates."
    spot: Any
    "Index of each of them among the active ones."
    joined: Any
    "0: the last event that changed the rate of each active transfer."


def share_ports(tasks: SharedTasks, flows: SharedFlows, active: ActiveTransfers) -> int:
    """Fill `start` and `moment` as `kernel.sweep_tasks` does, and return the number of tasks that ran.

    Fewer than all tasks run if the dependencies have a cycle.
    """
    depth = done = waiting = running = event = 0
    for task in range(len(tasks.flow)):
        if tasks.waits[task] == 0:
            tasks.stack[depth] = task
            depth += 1
    while True:
        ran, waiting = run_tasks(depth, waiting, tasks)
        done += ran
        # At equal times the end of a transfer precedes the beginning of another.
        ending = first_ending(running, tasks, active)
        event += 1
        if waiting > 0 and (ending < 0 or tasks.ready[tasks.pending[0]] < active.ends_at[ending]):
            task = pop_pending(waiting, tasks)
            waiting -= 1
            now, depth, crowded = tasks.ready[task], 0, False
            begins = enter_queue(task, tasks, flows)
        elif ending >= 0:
            task = active.task[ending]
            running -= 1
            active.task[ending] = active.task[running]
            active.ends_at[ending] = active.ends_at[running]
            now, depth, tasks.stack[0] = tasks.finish[task], 1, task
            end_transfer(task, now, tasks)
            begins = leave_queue(task, tasks, flows)
            crowded = count_users(task, -1, event, tasks, flows)
        else:
            return done
        if begins >= 0:
            begin_transfer(begins, now, running, tasks, active)
            running += 1
            crowded = count_users(begins, 1, event, tasks, flows) or crowded
        if crowded:
            members = gather_connected(event, running, tasks, flows, active)
            fill_rates(members, tasks, flows, active)
            apply_rates(members, now, tasks, active)


def run_tasks(depth: int, waiting: int, tasks: SharedTasks) -> tuple[int, int]:
    """Run the `depth` tasks on the stack, and their dependents that need no port.

    A transfer that has not run joins the heap of `waiting` transfers. Returns (number of tasks that ran, size of the
    heap).
    """
    stack, waits, ready, moment, flow = tasks.stack, tasks.waits, tasks.ready, tasks.moment, tasks.flow
    first, then = tasks.first, tasks.then
    ran = 0
    while depth > 0:
        depth -= 1
        task = stack[depth]
        if flow[task] >= 0 and tasks.finish[task] < 0.0:
            push_pending(task, waiting, tasks)
            waiting += 1
            continue
        if flow[task] < 0:
            tasks.start[task] = ready[task]
            moment[2 * task] = ready[task] + tasks.duration[task]
            moment[2 * task + 1] = ready[task] + tasks.transit[task]
        ran += 1
        for entry in range(first[task], first[task + 1]):
            dependent = then[entry] // 2
            come = moment[2 * task + then[entry] % 2]
            if come > ready[dependent]:
                ready[dependent] = come
            waits[dependent] -= 1
            if waits[dependent] == 0:
                stack[depth] = dependent
                depth += 1
    return ran, waiting


def push_pending(task: int, size: int, tasks: SharedTasks) -> None:
    """Add a transfer to the heap of `size` transfers."""
    ready, rank, pending = tasks.ready, tasks.rank, tasks.pending
    index = size
    while index > 0:
        above = pending[(index - 1) // 2]
        if ready[above] < ready[task] or (ready[above] == ready[task] and rank[above] < rank[task]):
            break
        pending[index] = above
        index = (index - 1) // 2
    pending[index] = task


def pop_pending(size: int, tasks: SharedTasks) -> int:
    """Remove the first transfer from the heap of `size` transfers, and return it."""
    ready, rank, pending = tasks.ready, tasks.rank, tasks.pending
    task, moved, index = pending[0], pending[size - 1], 0
    while 2 * index + 1 < size - 1:
        below = 2 * index + 1
        if below + 1 < size - 1:
            left, right = pending[below], pending[below + 1]
            if ready[right] < ready[left] or (ready[right] == ready[left] and rank[right] < rank[left]):
                below += 1
        child = pending[below]
        if ready[moved] < ready[child] or (ready[moved] == ready[child] and rank[moved] < rank[child]):
            break
        pending[index] = child
        index = below
    pending[index] = moved
    return int(task)


def first_ending(running: int, tasks: SharedTasks, active: ActiveTransfers) -> int:
    """Return the index of the active transfer that ends first, by rank at equal times; -1 without one."""
    ends_at, task, rank = active.ends_at, active.task, tasks.rank
    best = -1
    for index in range(running):
        if best < 0 or ends_at[index] < ends_at[best] or (
            ends_at[index] == ends_at[best] and rank[task[index]] < rank[task[best]]
        ):  # fmt: skip
            best = index
    return best


def enter_queue(task: int, tasks: SharedTasks, flows: SharedFlows) -> int:
    """Add a transfer to its queue; return it if it may begin, else -1."""
    queue = flows.queue[tasks.flow[task]]
    if queue < 0:
        return task
    if flows.busy[queue] >= 0:
        tasks.behind[flows.tail[queue]] = task
        flows.tail[queue] = task
        return -1
    flows.busy[queue] = task
    flows.tail[queue] = task
    return task


def leave_queue(task: int, tasks: SharedTasks, flows: SharedFlows) -> int:
    """Remove a transfer from its queue; return the one that begins in its place, or -1."""
    queue = flows.queue[tasks.flow[task]]
    if queue < 0:
        return -1
    begins = tasks.behind[task]
    flows.busy[queue] = begins
    if begins < 0:
        flows.tail[queue] = -1
    return int(begins)


def begin_transfer(task: int, now: float, running: int, tasks: SharedTasks, active: ActiveTransfers) -> None:
    """Add a transfer to the `running` active ones, at its full rate."""
    tasks.start[task] = now
    tasks.left[task] = tasks.duration[task]
    tasks.since[task] = now
    tasks.finish[task] = now + tasks.duration[task]
    active.task[running] = task
    active.ends_at[running] = tasks.finish[task]


def end_transfer(task: int, now: float, tasks: SharedTasks) -> None:
    """Write the moments of a transfer that ends now; one that was never slowed has those of the sweep."""
    tasks.moment[2 * task] = now
    tasks.moment[2 * task + 1] = now + (tasks.transit[task] - tasks.duration[task])
    if now == tasks.start[task] + tasks.duration[task]:
        tasks.moment[2 * task + 1] = tasks.start[task] + tasks.transit[task]


def count_users(task: int, change: int, event: int, tasks: SharedTasks, flows: SharedFlows) -> bool:
    """Mark the ports of a transfer that begins (`change` 1) or ends (-1), and count their users.

    Returns whether another transfer uses one of them.
    """
    flow, crowded = tasks.flow[task], False
    others = 1 if change > 0 else 0
    for entry in range(flows.first_port[flow], flows.first_port[flow + 1]):
        port = flows.port[entry]
        flows.marked[port] = event
        flows.users[port] += change
        crowded = crowded or flows.users[port] > others
    return crowded


def gather_connected(event: int, running: int, tasks: SharedTasks, flows: SharedFlows, active: ActiveTransfers) -> int:
    """Collect in `group` the transfers that are connected, by shared ports, with a port marked for this event.

    They are without rates then, and their ports are empty. Returns their number.
    """
    first_port, port, marked, joined = flows.first_port, flows.port, flows.marked, active.joined
    grows = True
    while grows:
        grows = False
        for index in range(running):
            if joined[index] == event:
                continue
            flow = tasks.flow[active.task[index]]
            for entry in range(first_port[flow], first_port[flow + 1]):
                if marked[port[entry]] == event:
                    joined[index] = event
                    break
            if joined[index] == event:
                for entry in range(first_port[flow], first_port[flow + 1]):
                    if marked[port[entry]] != event:
                        marked[port[entry]] = event
                        grows = True
    members = 0
    for index in range(running):
        if joined[index] == event:
            task = active.task[index]
            for entry in range(first_port[tasks.flow[task]], first_port[tasks.flow[task] + 1]):
                flows.room[port[entry]] = 1.0
            tasks.fresh[task] = -1.0
            active.group[members] = task
            active.spot[members] = index
            members += 1
    return members


def fill_rates(members: int, tasks: SharedTasks, flows: SharedFlows, active: ActiveTransfers) -> None:
    """Give every member a rate in `fresh`: those on the tightest port, or at their full rate, first."""
    flow, fresh, group = tasks.flow, tasks.fresh, active.group
    first_port, port, weight, room = flows.first_port, flows.port, flows.weight, flows.room
    open_flows = members
    while open_flows > 0:
        least, tight = tightest_port(members, tasks, flows, active)
        for index in range(members):
            task = group[index]
            if fresh[task] >= 0.0:
                continue
            begin, end = first_port[flow[task]], first_port[flow[task] + 1]
            chosen = tight < 0 and 1.0 / weight[flow[task]] <= least
            for entry in range(begin, end):
                chosen = chosen or port[entry] == tight
            if chosen:
                fresh[task] = min(1.0, max(least, 0.0) * weight[flow[task]]) if tight >= 0 else 1.0
                fresh[task] = max(fresh[task], 1e-9)
                open_flows -= 1
                for entry in range(begin, end):
                    room[port[entry]] = max(0.0, room[port[entry]] - flows.use[entry] * fresh[task])


def tightest_port(members: int, tasks: SharedTasks, flows: SharedFlows, active: ActiveTransfers) -> tuple[float, int]:
    """Return (bytes per second of each message, port) where the members without a rate are slowed most.

    The port is -1 if one of them reaches its full rate first.
    """
    flow, fresh, group = tasks.flow, tasks.fresh, active.group
    first_port, port, weight, asked = flows.first_port, flows.port, flows.weight, flows.asked
    for index in range(members):
        task = group[index]
        for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
            asked[port[entry]] = 0.0
    least, tight = -1.0, -1
    for index in range(members):
        task = group[index]
        if fresh[task] < 0.0:
            for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                asked[port[entry]] += flows.use[entry] * weight[flow[task]]
            if least < 0.0 or 1.0 / weight[flow[task]] < least:
                least = 1.0 / weight[flow[task]]
    for index in range(members):
        task = group[index]
        if fresh[task] < 0.0:
            for entry in range(first_port[flow[task]], first_port[flow[task] + 1]):
                level = flows.room[port[entry]] / asked[port[entry]]
                if level < least * (1.0 - 1e-9):
                    least, tight = level, port[entry]
    return least, tight


def apply_rates(members: int, now: float, tasks: SharedTasks, active: ActiveTransfers) -> None:
    """Change the rates of the members from now on."""
    fresh, rate, left, finish = tasks.fresh, tasks.rate, tasks.left, tasks.finish
    for index in range(members):
        task = active.group[index]
        if fresh[task] != rate[task]:
            left[task] = max(0.0, left[task] - (now - tasks.since[task]) * rate[task])
            tasks.since[task] = now
            rate[task] = fresh[task]
            finish[task] = now + left[task] / rate[task]
            active.ends_at[active.spot[index]] = finish[task]
