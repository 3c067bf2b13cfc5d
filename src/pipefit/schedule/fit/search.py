"""The whole of fitting: constructions, improvement, and the simulator's word on the winner."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from pipefit.cost.types import CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule.fit.arrays import PLAIN, Loops, compiled, tables
from pipefit.schedule.fit.construct import Start, block_starts, family_starts, merge_choices
from pipefit.schedule.fit.improve import Budget, improve
from pipefit.schedule.fit.instance import Floats, Instance, Objective, schedule_of
from pipefit.schedule.fit.result import Fit
from pipefit.schedule.fit.verify import least_bytes, peaks
from pipefit.schedule.problem import Problem

MOVES = 60_000
"""Moves of the local search that are tried by default."""
REPAIRS = 6
"""Times that limits are tightened because of receive buffers before giving up."""


def fit(
    problem: Problem,
    *,
    moves: int = MOVES,
    seconds: float | None = None,
    exact_seconds: float = 0.0,
    seed: int = 0,
    objective: Objective = "makespan",
    options: Mapping[str, CostTable] | None = None,
    use_numba: bool = True,
) -> Fit:
    """The best schedule found for the true times of `problem.costs` within `problem.limit_bytes`.

    The same `moves` and `seed` give the same schedule on every machine; `seconds` only stops the search earlier.
    Without numba (`use_numba`) the result is the same, and takes far longer. Raises ScheduleError where the limit is
    below what any schedule needs, saying the least, and for times that are not positive.
    """
    began = time.perf_counter()
    instance = Instance.of(problem, objective)
    loops = compiled() if use_numba else PLAIN
    budget = Budget(moves, math.inf if seconds is None else began + seconds)
    limit = instance.limit_bytes.copy()
    best: Start | None = None
    for attempt in range(REPAIRS):
        t = tables(instance, limit)
        starts = all_starts(instance, problem, loops, limit)
        if not starts:
            raise _too_tight(problem, instance, loops)
        first = starts[0]
        excess = _excess(problem, instance, first)
        if (excess > 0).any():
            limit = limit - excess
            continue
        found = improve(instance, t, loops, starts, budget, seed)
        excess = _excess(problem, instance, found)
        if (excess <= 0).all():
            best = found
            break
        limit = limit - excess
        best = first
        budget.moves += moves // 2
        del attempt
    if best is None:
        raise _too_tight(problem, instance, loops)
    return _result(problem, instance, best, budget.spent)


def all_starts(instance: Instance, problem: Problem, loops: Loops, limit: Floats) -> list[Start]:
    """All constructions that fit, best first, without doubles."""
    t = tables(instance, limit)
    starts = list(family_starts(instance, problem, t, loops))
    for merge in merge_choices(instance):
        starts += block_starts(instance, t, loops, merge)
    starts.sort(key=lambda start: start.time_s)
    seen, kept = set(), []
    for start in starts:
        key = b"".join(order.tobytes() for order in start.orders)
        if key not in seen:
            seen.add(key)
            kept.append(start)
    return kept


def _excess(problem: Problem, instance: Instance, start: Start) -> Floats:
    """Per lane: the bytes by which the simulator's peak is above the limit."""
    if problem.limit_bytes is None:
        return np.zeros(instance.lanes)
    assert problem.costs is not None
    excess = peaks(problem, schedule_of(instance, start.orders)) - np.array(problem.limit_bytes)
    return np.where(excess > 1e-9 * np.array(problem.limit_bytes), excess, 0.0)


def _too_tight(problem: Problem, instance: Instance, loops: Loops) -> ScheduleError:
    least = least_bytes(problem, instance, loops)
    assert problem.limit_bytes is not None
    lane = int(np.argmax(least - np.array(problem.limit_bytes)))
    return ScheduleError(
        "No schedule fits in the memory limit: one microbatch alone needs more.",
        where=f"lane {lane}",
        seen=f"{problem.limit_bytes[lane]:.6g} bytes",
        allowed=f"{least[lane]:.6g} bytes or more; by lane: {', '.join(f'{value:.6g}' for value in least)}",
        next_step="raise the limit, make microbatches smaller, or recompute activations",
    )


def _result(problem: Problem, instance: Instance, best: Start, spent: int) -> Fit:
    schedule = schedule_of(instance, best.orders)
    work_s = float(instance.work_s().max())
    return Fit(
        schedule=schedule,
        time_s=best.time_s,
        bound_s=work_s,
        bubble=1.0 - work_s / best.time_s,
        recompute=(),
        peak_bytes=tuple(peaks(problem, schedule).tolist()),
        how=best.name,
        moves=spent,
    )
