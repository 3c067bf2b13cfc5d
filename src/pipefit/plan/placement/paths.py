"""The critical path of a placement in the simulator, as a linear function of the placed times.

With the order of the actions fixed, the simulated step is the maximum over all paths through the task graph of the sum
of their times, and so a convex function of the times. Every path is a lower bound for all placements, and the critical
path of one placement is exact there. The maximum of the paths seen so far is the estimate of the search (cutting
planes: Kelley 1960).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipefit.cost.types import Array, Ints
from pipefit.plan.placement.links import TICK_S
from pipefit.plan.placement.shape import PlacementProblem
from pipefit.schedule.taskgraph.compile import TaskGraph
from pipefit.schedule.taskgraph.table import GATHER, REDUCE, SEND_B, SEND_F, STEP, B, F, I, W
from pipefit.schedule.taskgraph.times import TaskTimes, run_sweep
from pipefit.simulate import Timeline
from pipefit.simulate.path import critical_tasks

COMPUTE_NAMES = {F: "F", I: "I", W: "W", B: "B"}


class CriticalPaths:
    """The task graph of one candidate, whose times are filled in from x."""

    def __init__(self, question: PlacementProblem, timeline: Timeline) -> None:
        self.entries = question.entry_count
        self.graph: TaskGraph = timeline.graph
        times = timeline.times
        self.duration_s: Array = times.duration_s.copy()
        self.transit_s: Array = times.arrival_s - times.start_s
        self.duration_at: Ints = np.full(self.graph.size, -1, dtype=np.int64)
        self.transit_at: Ints = self.duration_at.copy()
        self.tied: list[tuple[int, tuple[int, ...]]] = []
        "(task, flows whose full times are added to its own)."
        self._fill_tasks(question, timeline)

    def _fill_tasks(self, question: PlacementProblem, timeline: Timeline) -> None:
        graph, flows = self.graph, question.flow_count
        terms, rows = 2 * flows, 2 * flows + len(question.shape.passes)
        overhead_s = timeline.costs.overhead_s
        columns = (graph.kind, graph.stage, graph.edge, graph.slice, graph.lane, graph.plain)
        for task, (kind, stage, edge, slice_, lane, plain) in enumerate(
            zip(*(c.tolist() for c in columns), strict=True)
        ):
            if kind in (SEND_F, SEND_B):
                flow = question.flow_of[(*graph.table.edges[edge], "F" if kind == SEND_F else "B", slice_)]
                self.transit_at[task], self.duration_at[task] = flow, flows + flow
            elif kind in COMPUTE_NAMES and (COMPUTE_NAMES[kind], stage, slice_) in question.row_of:
                self.duration_at[task] = rows + question.row_of[COMPUTE_NAMES[kind], stage, slice_]
                self.duration_s[task] = overhead_s
            elif kind == STEP and ("STEP", lane, 0) in question.row_of:
                self.duration_at[task] = rows + question.row_of["STEP", lane, 0]
                self.duration_s[task] = 0.0
            elif kind in (REDUCE, GATHER) and plain:
                self._fill_collective(question, terms, task, "reduce" if kind == REDUCE else "gather", stage)
        self.duration_s[self.graph.consumer >= 0] = 0.0
        self.transit_s[self.transit_at >= 0] = 0.0

    def _fill_collective(self, question: PlacementProblem, terms: int, task: int, what: str, stage: int) -> None:
        flows = question.tied.get(stage, ()) if what == "reduce" else ()
        if flows:
            self.tied.append((task, flows))
        if (what, stage) in question.term_of:
            self.duration_at[task] = terms + question.term_of[what, stage]
        if flows or (what, stage) in question.term_of:
            self.duration_s[task] = 0.0

    def task_times(self, x: Ints) -> TaskTimes:
        """Return the start and stop times of every task."""
        seconds = np.append(x * TICK_S, 0.0)
        duration_s, transit_s = self.duration_s + seconds[self.duration_at], self.transit_s + seconds[self.transit_at]
        for task, flows in self.tied:
            duration_s[task] += seconds[list(flows)].sum()
        return run_sweep(self.graph, duration_s, transit_s)

    def step_s(self, x: Ints) -> float:
        """Return the simulated step in seconds."""
        times = self.task_times(x)
        return float(np.maximum(times.stop_s, times.arrival_s).max())

    def critical_cut(self, x: Ints) -> tuple[float, Ints, int]:
        """Return (simulated step in seconds, weights [x] and constant in ticks of the critical path there)."""
        times = self.task_times(x)
        path = critical_tasks(self.graph, times)
        tasks = np.array([task for task, _ in path], dtype=np.int64)
        reached = np.array([moment for _, moment in path])
        arrived: NDArray[np.bool_] = (self.graph.consumer[tasks] >= 0) & (reached == times.arrival_s[tasks])
        entries = np.where(arrived, self.transit_at[tasks], self.duration_at[tasks])
        fixed_s = np.where(arrived, self.transit_s[tasks], self.duration_s[tasks])
        weight = np.zeros(self.entries, dtype=np.int64)
        np.add.at(weight, entries[entries >= 0], 1)
        on_path = set(tasks.tolist())
        for task, flows in self.tied:
            if task in on_path:
                weight[list(flows)] += 1
        step_s = float(np.maximum(times.stop_s, times.arrival_s).max())
        return step_s, weight, int(np.rint(fixed_s / TICK_S).sum())
