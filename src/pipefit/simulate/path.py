"""The critical path: backwards from what ends last, always to a predecessor that the start had to wait for."""

from __future__ import annotations

import numpy as np

from pipefit.schedule.compile import TaskGraph
from pipefit.schedule.table import BARRIER
from pipefit.schedule.times import Times


def critical_tasks(graph: TaskGraph, times: Times) -> list[tuple[int, float]]:
    """(task, moment until which it counts) along the path, first to last.

    The moment is the start of the next task: a task's stop, or a transfer's arrival, or, where the next transfer
    waited for the port, the moment the port was free. Times are compared exactly: a start is the maximum of these
    very sums. Barriers take no time and are left out.
    """
    if not graph.size:
        return []
    ends = np.maximum(times.stop_s, times.arrival_s)
    task = int(ends.argmax())
    path = [(task, float(ends[task]))]
    while times.start_s[task] > 0.0:
        low, high = graph.pointer[task], graph.pointer[task + 1]
        sources = graph.source[low:high]
        ready = times.start_s[sources] + times.lag_s[low:high]
        task = int(sources[int((ready == times.start_s[task]).argmax())])
        path.append((task, float(ready.max())))
    return [(task, reached) for task, reached in reversed(path) if graph.kind[task] != BARRIER]
