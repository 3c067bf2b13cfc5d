"""Recomputation as a knob of each stage: which of several cost tables holds for it.

Recomputing saves memory and takes time. A choice is one option name a stage; it begins uniform, then stages take
another option if the orders that memory then allows are quicker; a short local search on the best choices decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from pipefit.cost.types import ActionTable, CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule.fit.instance import FitInstance, Objective
from pipefit.schedule.fit.kernels.arrays import make_tables, retime_tables
from pipefit.schedule.fit.kernels.sweep import InstanceTables
from pipefit.schedule.problem import ScheduleProblem

Choice: TypeAlias = tuple[str, ...]


def problem_of_choice(problem: ScheduleProblem, options: Mapping[str, CostTable], choice: Choice) -> ScheduleProblem:
    """The problem in which every stage has the costs of its choice."""
    first = next(iter(options.values()))
    shape = (problem.num_stages, problem.microbatches, problem.slices)
    actions = {}
    for name in first.actions:
        columns = {}
        for field in ("time_s", "held_bytes", "peak_bytes"):
            by_option = {
                option: np.broadcast_to(getattr(table.actions[name], field), shape) for option, table in options.items()
            }
            columns[field] = np.stack([by_option[option][stage] for stage, option in enumerate(choice)])
        actions[name] = ActionTable(**columns)
    return replace(problem, costs=replace(first, actions=actions))


class OptionMixture:
    """The instances in which every stage has one of several options. `problem` says all but the costs."""

    def __init__(self, problem: ScheduleProblem, options: Mapping[str, CostTable], objective: Objective) -> None:
        self.place = {name: place for place, name in enumerate(options)}
        self.uniform = [
            FitInstance.from_problem(problem_of_choice(problem, options, (name,) * problem.num_stages), objective)
            for name in options
        ]
        self.tables = make_tables(self.uniform[0])
        fields = ("time_s", "held_bytes", "passing_bytes", "may_split", "may_merge")
        self.by_option = {field: np.stack([getattr(one, field) for one in self.uniform], axis=-1) for field in fields}

    def mixed_instance(self, choice: Choice) -> tuple[FitInstance, InstanceTables]:
        """The instance of a choice, and its tables."""
        rows = np.array([self.place[name] for name in choice])
        stages = np.arange(len(rows))
        columns: dict[str, Any] = {}
        for field, table in self.by_option.items():
            one = table[stages, rows] if table.ndim == 2 else table[:, stages, :, rows].swapaxes(0, 1)
            columns[field] = np.ascontiguousarray(one)
        instance = replace(self.uniform[0], **columns)
        return instance, retime_tables(self.tables, instance)


def check_options(options: Mapping[str, CostTable]) -> None:
    """Raise ScheduleError where the tables cannot be mixed: none at all, or other actions in one than in another."""
    kinds = {name: tuple(sorted(table.actions)) for name, table in options.items()}
    if len(set(kinds.values())) != 1:
        raise ScheduleError(
            "The options of a schedule must be cost tables of the same actions.",
            where="options",
            seen="; ".join(f"{name}: {', '.join(found)}" for name, found in kinds.items()) or "none",
            allowed="one cost table or more, each with F and with I, W or B",
        )


def search_choices(
    stages: int,
    names: Sequence[str],
    value: Callable[[Choice], float],
    still_going: Callable[[], bool],
) -> list[Choice]:
    """Good choices, best first: the uniform ones that fit, and what a search from each of them ends at, which gives
    another option to the first so many stages, to the last, or to one. `value` of a choice is its time, inf where it
    does not fit."""
    known = {choice: value(choice) for choice in ((name,) * stages for name in names)}
    for start in [choice for choice, time_s in known.items() if math.isfinite(time_s)]:
        best = start
        better = len(names) > 1
        while better and still_going():
            better = False
            for (low, high), name in product(_stage_runs(stages), names):
                other = (*best[:low], *(name,) * (high - low), *best[high:])
                if other not in known and still_going():
                    known[other] = value(other)
                if known.get(other, math.inf) < known[best] * (1 - 1e-9):
                    best, better = other, True
        known[best] *= 1 - 1e-12  # the ends of searches before what they passed through
    ends = [choice for choice, time_s in known.items() if math.isfinite(time_s)]
    return sorted(ends, key=lambda choice: known[choice])


def _stage_runs(stages: int) -> list[tuple[int, int]]:
    """[first, last) of the first so many stages, of the last, and of each one."""
    ahead = [(0, stop) for stop in range(1, stages)]
    return [*ahead, *((start, stages) for start in range(1, stages)), *((one, one + 1) for one in range(stages))]
