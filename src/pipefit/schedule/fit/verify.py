"""What the simulator says about a fitted schedule: its memory with all buffers, and the least that any one needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipefit.schedule.actions import Schedule
from pipefit.schedule.fit.arrays import Loops, tables
from pipefit.schedule.fit.construct import built, merge_choices
from pipefit.schedule.fit.instance import B, F, Floats, I, Instance, W, schedule_of
from pipefit.schedule.fit.start import Start
from pipefit.schedule.lower import lower
from pipefit.schedule.problem import Problem


def peaks(problem: Problem, schedule: Schedule) -> Floats:
    """Per lane: the peak of memory in bytes when the schedule runs with its transfers."""
    from pipefit.simulate import simulate

    assert problem.costs is not None
    lowered = lower(schedule, problem.dag, problem.costs, reductions=(), optimizer=False)
    found: Floats = simulate(lowered, problem.costs).peak_bytes
    return found


def excess(problem: Problem, instance: Instance, start: Start) -> Floats:
    """Per lane: the bytes by which the peak is above the limit."""
    over = np.zeros(instance.lanes)
    if problem.limit_bytes is not None:
        limit = np.array(problem.limit_bytes)
        over = peaks(problem, schedule_of(instance, start.orders)) - limit
        over[over <= 1e-9 * np.abs(limit)] = 0.0
    return over


def least_bytes(problem: Problem, instance: Instance, loops: Loops) -> Floats:
    """Per lane: the peak when one microbatch runs after the other, which no schedule can go below; of split and merged
    backwards the better."""
    found = [peaks(problem, schedule_of(instance, start.orders)) for start in one_by_one(instance, loops)]
    least: Floats = np.array(found).min(axis=0)
    return least


def one_by_one(instance: Instance, loops: Loops) -> list[Start]:
    """Orders in which one microbatch runs after the other, with split and with merged backwards."""
    found = []
    turn = np.arange(instance.units) // instance.slices * float(instance.time_s.sum())
    wish = np.tile(turn, (3 * instance.stages, 1))
    for merge in merge_choices(instance):
        limit = np.array([alone(instance, lane, merge) for lane in range(instance.lanes)]) * (1 + 1e-9)
        made = built(instance, tables(replace(instance, limit_bytes=limit)), loops, wish, merge)
        assert made is not None
        found.append(replace(made, name="one microbatch after the other"))
    return found


def least_held(instance: Instance) -> Floats:
    """Per lane: what one microbatch alone takes, without buffers."""
    by_choice = [[alone(instance, lane, merge) for lane in range(instance.lanes)] for merge in merge_choices(instance)]
    least: Floats = np.array(by_choice).min(axis=0)
    return least


def alone(instance: Instance, lane: int, merge: NDArray[np.bool_]) -> float:
    """The most that a lane holds when one microbatch runs after the other, all its forwards first."""
    most = 0.0
    held = instance.held(lane)
    for microbatch in range(instance.microbatches):
        ahead = range(microbatch * instance.slices, (microbatch + 1) * instance.slices)
        steps = [(F, stage, unit) for stage in held for unit in ahead]
        for stage in reversed(held):
            for unit in reversed(ahead):
                steps += [(B, stage, unit)] if merge[stage] else [(I, stage, unit), (W, stage, unit)]
        level = 0.0
        for kind, stage, unit in steps:
            change = float(instance.held_bytes[kind, stage, unit])
            most = max(most, level + max(change, 0.0) + float(instance.passing_bytes[kind, stage, unit]))
            level += change
    return most
