"""Times of a schedule under port contention: all data-parallel pipelines are simulated, and their transfers share
ports.

The task graph of the lanes is copied for every pipeline of `cost.types.PortContention`. Reductions, gathers and the
norm exist once and wait for all pipelines. The returned times are those of the pipeline that finishes last, in the
shape of the lanes' graph, so that every reader of a timeline can use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pipefit.cost.types import Array, CostTable, Ints, PortContention, PortFlow
from pipefit.errors import ScheduleError
from pipefit.schedule.actions import Schedule
from pipefit.schedule.problem import Edge
from pipefit.schedule.taskgraph import fluid
from pipefit.schedule.taskgraph.compile import TaskGraph, task_graph
from pipefit.schedule.taskgraph.fluid import ActiveTransfers, SharedFlows, SharedTasks
from pipefit.schedule.taskgraph.kernel import compile_modules, pays_to_compile
from pipefit.schedule.taskgraph.table import BARRIER, GATHER, REDUCE, SEND_B, SEND_F, B, F, I, W
from pipefit.schedule.taskgraph.times import TaskTimes, run_graph, task_durations

COMPILED_DEPENDENCIES = 15_000
"""Number of dependencies from which importing numba pays: an event costs more than an entry of the plain sweep."""

Group = TypeVar("Group", SharedTasks, SharedFlows, ActiveTransfers)

UNSHARED_FLOW = PortFlow((), (), 1.0)
"""The flow of a transfer that shares no port."""


@dataclass(frozen=True, slots=True)
class TaskCopies:
    """The tasks of all pipelines: copy k of task t is `base[t] + k`, or `base[t]` if all pipelines do it together."""

    base: Ints
    once: Ints
    "1 if all pipelines do the task together, else 0."
    size: int
    waits: Ints
    "Number of moments that each copy waits for."
    first: Ints
    then: Ints
    "`then[first[t]:first[t + 1]]` are the copies that wait for copy t: 2 x copy + (0: its stop, 1: its arrival)."

    def pipeline_copies(self, pipeline: int) -> Ints:
        """Return the copies of all tasks that belong to a pipeline."""
        return self.base + np.where(self.once == 1, 0, pipeline)


def evaluate_schedule(
    schedule: Schedule, edges: tuple[Edge, ...] | None, costs: CostTable, compiled: bool | None = None
) -> tuple[TaskGraph, TaskTimes]:
    """Return the task graph of a schedule and its times, with the port contention of `costs`, or with a port of its own
    for every lane if `costs` have none."""
    graph = task_graph(schedule, edges, own_ports=costs.contention is None)
    return graph, (run_graph if costs.contention is None else run_contended)(graph, costs, compiled)


def run_contended(graph: TaskGraph, costs: CostTable, compiled: bool | None = None) -> TaskTimes:
    """Return the times of every task in the pipeline that finishes last.

    `graph` is compiled without `own_ports`. `compiled` forces numba on or off; both give the same bits.
    """
    shared = costs.contention
    assert shared is not None
    copies = copy_tasks(graph, len(shared.pipelines))
    duration, transit = np.zeros(copies.size), np.zeros(copies.size)
    common, _ = task_durations(graph, costs)
    per_pipeline = (graph.kind <= B) | (graph.consumer >= 0)
    for pipeline, table in enumerate(shared.pipelines):
        times, arrivals = task_durations(graph, table)
        duration[copies.pipeline_copies(pipeline)] = np.where(per_pipeline, times, common)
        transit[copies.pipeline_copies(pipeline)] = arrivals
    flow, flows = _task_flows(graph, copies, shared)
    rank = np.empty(copies.size, dtype=np.int64)
    for pipeline in range(len(shared.pipelines)):
        rank[copies.pipeline_copies(pipeline)] = graph.row * len(shared.pipelines) + pipeline
    tasks = _shared_tasks(copies, flow, duration, transit, rank)
    start, moment = _run_shared(tasks, _shared_flows(shared, flows), compiled)
    last = _last_pipeline(graph, copies, moment, len(shared.pipelines))
    seen = copies.pipeline_copies(last)
    stop, arrival = moment[0::2][seen], moment[1::2][seen]
    moments = np.empty(2 * graph.size)
    moments[0::2], moments[1::2] = stop, arrival
    return TaskTimes(start_s=start[seen], moment_s=moments, duration_s=stop - start[seen])


def copy_tasks(graph: TaskGraph, pipelines: int) -> TaskCopies:
    """Return the tasks of all pipelines with their dependencies."""
    once = np.isin(graph.kind, (REDUCE, GATHER, BARRIER)).astype(np.int64)
    counts = np.where(once == 1, 1, pipelines)
    base = np.concatenate(([0], np.cumsum(counts)))
    order = np.argsort(graph.after // 2, kind="stable")
    task = np.repeat(np.arange(graph.size), np.diff(graph.pointer))[order]
    before, what = graph.after[order] // 2, graph.after[order] % 2
    # Each dependency is repeated for the copies of the task that has more of them. The dependencies on a task with
    # copies are stored copy by copy.
    wait_copies = np.where((once[task] == 1) & (once[before] == 1), 1, pipelines)
    hanging = np.bincount(before, minlength=graph.size)
    rank = np.arange(len(task)) - (np.cumsum(hanging) - hanging)[before]
    single = once[before] == 1
    slot = np.cumsum(wait_copies) - wait_copies - np.where(single, 0, (pipelines - 1) * rank)
    step, first, next_ = np.where(single, 1, hanging[before]), 2 * base[task] + what, np.where(once[task] == 1, 0, 2)
    then = np.empty(int(wait_copies.sum()), dtype=np.int64)
    then[slot] = first
    several = np.flatnonzero(wait_copies > 1)
    slot, step, first, next_ = slot[several], step[several], first[several], next_[several]
    for k in range(1, pipelines):
        then[slot + k * step] = first + k * next_
    hangs = np.where(once == 1, np.bincount(before, weights=wait_copies, minlength=graph.size), hanging)
    waits = np.where(once == 1, np.bincount(task, weights=wait_copies, minlength=graph.size), np.diff(graph.pointer))
    return TaskCopies(
        base=base[:-1],
        once=once,
        size=int(base[-1]),
        waits=np.repeat(waits.astype(np.int64), counts),
        first=np.concatenate(([0], np.cumsum(np.repeat(hangs.astype(np.int64), counts)))),
        then=then,
    )


def _task_flows(graph: TaskGraph, copies: TaskCopies, shared: PortContention) -> tuple[Ints, list[PortFlow]]:
    """Return (index of the flow of every copy, or -1 without one; the flows)."""
    known = {key: number for number, key in enumerate(shared.flows)}
    flows = [*shared.flows.values(), UNSHARED_FLOW]
    edges = {(edge.source, edge.target, edge.tensor): i for i, edge in enumerate(shared.pipelines[0].edges)}
    edge_of = np.array([edges[edge] for edge in graph.table.edges] or [0], dtype=np.int64)
    flow_of = np.full(copies.size, -1, dtype=np.int64)
    for pipeline in range(len(shared.pipelines)):
        pipeline_copies = copies.pipeline_copies(pipeline)
        for code, send_kind in ((SEND_F, "SEND_F"), (SEND_B, "SEND_B")):
            tasks = np.flatnonzero(graph.kind == code)
            lookup = np.array(
                [
                    [
                        known.get((send_kind, int(edge), slice_, pipeline), len(known))
                        for slice_ in range(_task_slices(graph))
                    ]
                    for edge in edge_of
                ],
                dtype=np.int64,
            )
            flow_of[pipeline_copies[tasks]] = lookup[graph.edge[tasks], graph.slice[tasks]]
        for code, kind in ((F, "F"), (I, "I"), (W, "W"), (B, "B")):
            lookup = np.array(
                [
                    [known.get((kind, stage, slice_, pipeline), -1) for slice_ in range(_task_slices(graph))]
                    for stage in range(graph.schedule.num_stages)
                ],
                dtype=np.int64,
            )
            tasks = np.flatnonzero(graph.kind == code)
            flow_of[pipeline_copies[tasks]] = lookup[graph.stage[tasks], graph.slice[tasks]]
    for code, name in ((REDUCE, "REDUCE"), (GATHER, "GATHER")):
        for task in np.flatnonzero((graph.kind == code) & graph.plain).tolist():
            flow_of[copies.base[task]] = known.get((name, int(graph.stage[task]), 0, 0), -1)
    return flow_of, flows


def _task_slices(graph: TaskGraph) -> int:
    return graph.schedule.slices


def _shared_tasks(copies: TaskCopies, flow: Ints, duration: Array, transit: Array, rank: Ints) -> SharedTasks:
    size = copies.size
    return SharedTasks(
        first=copies.first,
        then=copies.then,
        waits=copies.waits.copy(),
        duration=duration,
        transit=transit,
        rank=rank,
        flow=flow,
        start=np.zeros(size),
        moment=np.zeros(2 * size),
        ready=np.zeros(size),
        left=np.zeros(size),
        rate=np.ones(size),
        since=np.zeros(size),
        finish=np.full(size, -1.0),
        fresh=np.zeros(size),
        behind=_filled_integers(size, -1),
        stack=_filled_integers(size),
        pending=_filled_integers(size),
    )


def _run_shared(tasks: SharedTasks, ports: SharedFlows, compiled: bool | None) -> tuple[Array, Array]:
    """Return (start of every copy, its moments)."""
    size, dependencies = len(tasks.flow), len(tasks.then)
    active = _active_transfers(size)
    if compiled is None and dependencies >= COMPILED_DEPENDENCIES:
        compiled = True
    if pays_to_compile(dependencies, compiled):
        done = compile_modules((fluid,), ("share_ports",))["share_ports"](tasks, ports, active)
    else:
        tasks = _as_lists(tasks)
        done = fluid.share_ports(tasks, _as_lists(ports), _as_lists(active))
    if done < size:
        raise ScheduleError("The lanes wait for each other in a circle: no order of the actions satisfies all waits.")
    return np.array(tasks.start), np.array(tasks.moment)


def _as_lists(group: Group) -> Group:
    """Return the arrays as lists, which plain Python reads faster."""
    return type(group)(*(array.tolist() for array in group))


def _shared_flows(shared: PortContention, flows: list[PortFlow]) -> SharedFlows:
    ports, queues = max(1, shared.ports), max(1, shared.queues)
    return SharedFlows(
        first_port=np.cumsum([0, *(len(port_flow.ports) for port_flow in flows)]),
        port=np.array([number for port_flow in flows for number in port_flow.ports] or [0], dtype=np.int64),
        use=np.array([value for port_flow in flows for value in port_flow.use] or [0.0]),
        weight=np.array([1.0 / port_flow.bytes_per_s for port_flow in flows]),
        queue=np.array([port_flow.queue for port_flow in flows], dtype=np.int64),
        busy=_filled_integers(queues, -1),
        tail=_filled_integers(queues, -1),
        marked=_filled_integers(ports),
        room=np.zeros(ports),
        asked=np.zeros(ports),
        users=_filled_integers(ports),
    )


def _active_transfers(size: int) -> ActiveTransfers:
    return ActiveTransfers(
        task=_filled_integers(size),
        ends_at=np.zeros(size),
        group=_filled_integers(size),
        spot=_filled_integers(size),
        joined=_filled_integers(size),
    )


def _filled_integers(count: int, value: int = 0) -> Ints:
    return np.full(count, value, dtype=np.int64)


def _last_pipeline(graph: TaskGraph, copies: TaskCopies, moment: Array, pipelines: int) -> int:
    """Return the pipeline whose last compute action ends last."""
    compute = np.flatnonzero(graph.kind <= B)
    if not len(compute):
        return 0
    return int(np.argmax([moment[0::2][copies.pipeline_copies(k)[compute]].max() for k in range(pipelines)]))
