"""Simulation of fitted schedules: their memory with all buffers, and the minimum memory of any schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.actions import Schedule
from pipefit.schedule.fit.instance import B, F, FitInstance, Floats, I, Ints, W, schedule_of
from pipefit.schedule.fit.kernels.arrays import SearchLoops, make_tables
from pipefit.schedule.fit.starts.construct import build_orders, merge_choices, sweep_orders
from pipefit.schedule.fit.starts.start import TimedOrders
from pipefit.schedule.lowering.lower import lower_schedule
from pipefit.schedule.problem import ScheduleProblem
from pipefit.schedule.taskgraph.contended import evaluate_schedule
from pipefit.schedule.taskgraph.memory import memory_curves


def simulated_peaks(problem: ScheduleProblem, schedule: Schedule) -> Floats:
    """Return, by lane, the peak memory in bytes of the schedule with its transfers."""
    assert problem.costs is not None
    lowered = lower_schedule(schedule, problem.stage_edges, problem.costs, reductions=(), optimizer=False)
    graph, times = evaluate_schedule(lowered, None, problem.costs)
    return np.array([curve.peak_bytes for curve in memory_curves(graph, problem.costs, times)])


@dataclass(slots=True)
class SimulationMemo:
    """Simulation results of orders, with a cache of the last ones."""

    problem: ScheduleProblem
    instance: FitInstance
    start: TimedOrders | None = None
    schedule: Schedule | None = None
    peak_bytes: Floats | None = None

    def simulate_start(self, start: TimedOrders) -> tuple[Schedule, Floats]:
        """Return the schedule and the peak of every lane."""
        if self.start is not start or self.schedule is None or self.peak_bytes is None:
            self.start, self.schedule = start, schedule_of(self.instance, start.orders)
            self.peak_bytes = simulated_peaks(self.problem, self.schedule)
        return self.schedule, self.peak_bytes

    def excess_bytes(self, start: TimedOrders) -> Floats:
        """Return, by lane, the bytes by which the peak exceeds the limit."""
        if self.problem.limit_bytes is None:
            return np.zeros(self.instance.lanes)
        limit = np.array(self.problem.limit_bytes)
        over: Floats = self.simulate_start(start)[1] - limit
        over[over <= 1e-9 * np.abs(limit)] = 0.0
        return over


def least_bytes(problem: ScheduleProblem, instance: FitInstance, loops: SearchLoops) -> Floats:
    """Return, by lane, the peak if the microbatches run one at a time: the minimum over all schedules.

    The better of split and merged backwards counts.
    """
    peaks = [
        simulated_peaks(problem, schedule_of(instance, start.orders)) for start in sequential_orders(instance, loops)
    ]
    least: Floats = np.array(peaks).min(axis=0)
    return least


def sequential_orders(instance: FitInstance, loops: SearchLoops) -> list[TimedOrders]:
    """Return orders in which the microbatches run one at a time, with split and with merged backwards."""
    starts = []
    turn = np.arange(instance.num_units) // instance.slices * float(instance.time_s.sum())
    wish = np.tile(turn, (3 * instance.num_stages, 1))
    for merge in merge_choices(instance):
        limit = np.array([sequential_peak(instance, lane, merge) for lane in range(instance.lanes)]) * (1 + 1e-9)
        start = build_orders(instance, make_tables(replace(instance, limit_bytes=limit)), loops, wish, merge)
        if start is None:  # a forward that was started early can block a backward
            orders = [_sequential_order(instance, lane, merge) for lane in range(instance.lanes)]
            time_s = float(sweep_orders(instance, make_tables(instance), loops, orders).value[0])
            start = TimedOrders(time_s, "", orders)
        starts.append(replace(start, name="one microbatch after the other"))
    return starts


def _sequential_order(instance: FitInstance, lane: int, merge: NDArray[np.bool_]) -> Ints:
    """Return the operations of a lane if the microbatches run one at a time."""
    stages = instance.lane_stages(lane)
    operations = [
        instance.operation_number(kind, stages[position], unit)
        for microbatch in range(instance.microbatches)
        for kind, position, unit in _sequential_steps(instance, stages, microbatch, merge)
    ]
    return np.array(operations, dtype=np.int32)


def _sequential_steps(
    instance: FitInstance, stages: Sequence[int], microbatch: int, merge: NDArray[np.bool_]
) -> Iterator[tuple[int, int, int]]:
    """Yield (kind, position in `stages`, unit) of a microbatch: all forwards first, then all backwards."""
    ahead = range(microbatch * instance.slices, (microbatch + 1) * instance.slices)
    yield from ((F, position, unit) for position in range(len(stages)) for unit in ahead)
    for position in reversed(range(len(stages))):
        for unit in reversed(ahead):
            if merge[stages[position]]:
                yield B, position, unit
            else:
                yield I, position, unit
                yield W, position, unit


def least_held(instance: FitInstance) -> Floats:
    """Return, by lane, the memory of a single microbatch without buffers."""
    by_choice = [
        [sequential_peak(instance, lane, merge) for lane in range(instance.lanes)] for merge in merge_choices(instance)
    ]
    least: Floats = np.array(by_choice).min(axis=0)
    return least


def sequential_peak(instance: FitInstance, lane: int, merge: NDArray[np.bool_]) -> float:
    """Return the peak memory of a lane if the microbatches run one at a time, all forwards of each first."""
    peak = 0.0
    stages = list(instance.lane_stages(lane))
    held = instance.held_bytes[:, stages].tolist()
    need = (np.maximum(instance.held_bytes, 0.0) + instance.passing_bytes)[:, stages].tolist()
    for microbatch in range(instance.microbatches):
        level = 0.0
        for kind, position, unit in _sequential_steps(instance, stages, microbatch, merge):
            peak = max(peak, level + need[kind][position][unit])
            level += held[kind][position][unit]
    return peak
