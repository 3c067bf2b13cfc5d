"""What the simulator says about a fitted schedule: its memory with all buffers, and the least that any one needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.actions import Schedule
from pipefit.schedule.fit.instance import B, F, FitInstance, Floats, I, W, schedule_of
from pipefit.schedule.fit.kernels.arrays import SearchLoops, make_tables
from pipefit.schedule.fit.starts.construct import build_orders, merge_choices
from pipefit.schedule.fit.starts.start import TimedOrders
from pipefit.schedule.lowering.lower import lower_schedule
from pipefit.schedule.problem import ScheduleProblem


def simulated_peaks(problem: ScheduleProblem, schedule: Schedule) -> Floats:
    """Per lane: the peak of memory in bytes when the schedule runs with its transfers."""
    from pipefit.simulate import simulate_schedule

    assert problem.costs is not None
    lowered = lower_schedule(schedule, problem.stage_edges, problem.costs, reductions=(), optimizer=False)
    found: Floats = simulate_schedule(lowered, problem.costs).peak_bytes
    return found


@dataclass(slots=True)
class SimulationMemo:
    """What the simulator says of orders; the last ones are remembered."""

    problem: ScheduleProblem
    instance: FitInstance
    start: TimedOrders | None = None
    schedule: Schedule | None = None
    peak_bytes: Floats | None = None

    def simulate_start(self, start: TimedOrders) -> tuple[Schedule, Floats]:
        """The schedule and the peak of every lane."""
        if self.start is not start or self.schedule is None or self.peak_bytes is None:
            self.start, self.schedule = start, schedule_of(self.instance, start.orders)
            self.peak_bytes = simulated_peaks(self.problem, self.schedule)
        return self.schedule, self.peak_bytes

    def excess_bytes(self, start: TimedOrders) -> Floats:
        """Per lane: the bytes by which the peak is above the limit."""
        if self.problem.limit_bytes is None:
            return np.zeros(self.instance.lanes)
        limit = np.array(self.problem.limit_bytes)
        over: Floats = self.simulate_start(start)[1] - limit
        over[over <= 1e-9 * np.abs(limit)] = 0.0
        return over


def least_bytes(problem: ScheduleProblem, instance: FitInstance, loops: SearchLoops) -> Floats:
    """Per lane: the peak when one microbatch runs after the other, which no schedule can go below; of split and merged
    backwards the better."""
    found = [
        simulated_peaks(problem, schedule_of(instance, start.orders)) for start in sequential_orders(instance, loops)
    ]
    least: Floats = np.array(found).min(axis=0)
    return least


def sequential_orders(instance: FitInstance, loops: SearchLoops) -> list[TimedOrders]:
    """Orders in which one microbatch runs after the other, with split and with merged backwards."""
    found = []
    turn = np.arange(instance.num_units) // instance.slices * float(instance.time_s.sum())
    wish = np.tile(turn, (3 * instance.num_stages, 1))
    for merge in merge_choices(instance):
        limit = np.array([sequential_peak(instance, lane, merge) for lane in range(instance.lanes)]) * (1 + 1e-9)
        made = build_orders(instance, make_tables(replace(instance, limit_bytes=limit)), loops, wish, merge)
        assert made is not None
        found.append(replace(made, name="one microbatch after the other"))
    return found


def least_held(instance: FitInstance) -> Floats:
    """Per lane: what one microbatch alone takes, without buffers."""
    by_choice = [
        [sequential_peak(instance, lane, merge) for lane in range(instance.lanes)] for merge in merge_choices(instance)
    ]
    least: Floats = np.array(by_choice).min(axis=0)
    return least


def sequential_peak(instance: FitInstance, lane: int, merge: NDArray[np.bool_]) -> float:
    """The most that a lane holds when one microbatch runs after the other, all its forwards first."""
    most = 0.0
    stages = list(instance.lane_stages(lane))
    held = instance.held_bytes[:, stages].tolist()
    need = (np.maximum(instance.held_bytes, 0.0) + instance.passing_bytes)[:, stages].tolist()
    for microbatch in range(instance.microbatches):
        ahead = range(microbatch * instance.slices, (microbatch + 1) * instance.slices)
        steps = [(F, place, unit) for place in range(len(stages)) for unit in ahead]
        for place in reversed(range(len(stages))):
            for unit in reversed(ahead):
                steps += [(B, place, unit)] if merge[stages[place]] else [(I, place, unit), (W, place, unit)]
        level = 0.0
        for kind, place, unit in steps:
            most = max(most, level + need[kind][place][unit])
            level += held[kind][place][unit]
    return most
