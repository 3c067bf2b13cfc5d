"""The critical path: from the last task backwards, always to the predecessor that finished last."""

from __future__ import annotations

import numpy as np

from pipefit.schedule.taskgraph.compile import TaskGraph
from pipefit.schedule.taskgraph.table import BARRIER
from pipefit.schedule.taskgraph.times import TaskTimes


def critical_tasks(graph: TaskGraph, times: TaskTimes) -> list[tuple[int, float]]:
    """Return (task, end of its part of the path) along the critical path, first to last.

    The end is the start of the next task: a task's stop, a transfer's arrival, or, if the next transfer waited for the
    port, the time at which the port was free. Barriers take no time and are left out.
    """
    if not graph.size:
        return []
    ends = np.maximum(times.stop_s, times.arrival_s)
    task = int(ends.argmax())
    path = [(task, float(ends[task]))]
    while times.start_s[task] > 0.0:
        moments = graph.after[graph.pointer[task] : graph.pointer[task + 1]]
        last = int(moments[int(times.moment_s[moments].argmax())])
        task = last // 2
        path.append((task, float(times.moment_s[last])))
    return [(task, reached) for task, reached in reversed(path) if graph.kind[task] != BARRIER]
