"""Choice of a recomputation option for each stage: one of several cost tables.

Recomputing saves memory and takes time. A choice is one option name per stage. It begins uniform; then stages take
another option if the orders that then fit in memory are quicker. A short local search on the best choices decides.
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
    """Return the problem in which every stage has the costs of its choice."""
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
    """The instances in which every stage has one of several options. `problem` defines everything except the costs."""

    def __init__(self, problem: ScheduleProblem, options: Mapping[str, CostTable], objective: Objective) -> None:
        self.place = {name: row for row, name in enumerate(options)}
        self.uniform = [
            FitInstance.from_problem(problem_of_choice(problem, options, (name,) * problem.num_stages), objective)
            for name in options
        ]
        self.tables = make_tables(self.uniform[0])
        fields = ("time_s", "held_bytes", "passing_bytes", "may_split", "may_merge")
        self.by_option = {
            field: np.stack([getattr(instance, field) for instance in self.uniform], axis=-1) for field in fields
        }

    def mixed_instance(self, choice: Choice) -> tuple[FitInstance, InstanceTables]:
        """Return the instance of a choice, and its tables."""
        rows = np.array([self.place[name] for name in choice])
        stages = np.arange(len(rows))
        columns: dict[str, Any] = {}
        for field, table in self.by_option.items():
            column = table[stages, rows] if table.ndim == 2 else table[:, stages, :, rows].swapaxes(0, 1)
            columns[field] = np.ascontiguousarray(column)
        instance = replace(self.uniform[0], **columns)
        return instance, retime_tables(self.tables, instance)


def check_options(options: Mapping[str, CostTable]) -> None:
    """Raise ScheduleError if the tables cannot be mixed: no table at all, or tables with different actions."""
    kinds = {name: tuple(sorted(table.actions)) for name, table in options.items()}
    if len(set(kinds.values())) != 1:
        raise ScheduleError(
            "The options of a schedule must be cost tables of the same actions.",
            where="options",
            seen="; ".join(f"{name}: {', '.join(actions)}" for name, actions in kinds.items()) or "none",
            allowed="one cost table or more, each with F and with I, W or B",
        )


def search_choices(
    stages: int,
    names: Sequence[str],
    value: Callable[[Choice], float],
    still_going: Callable[[], bool],
) -> list[Choice]:
    """Return good choices, best first: the uniform ones that fit, and the results of a local search from each of them.

    A move gives another option to a first run of stages, to a last run, or to one stage. `value` of a choice is its
    time, inf if it does not fit.
    """
    known = {choice: value(choice) for choice in ((name,) * stages for name in names)}
    for start in [choice for choice, time_s in known.items() if math.isfinite(time_s)]:
        best = start
        better = len(names) > 1
        while better and still_going():
            better = False
            for (low, high), name in product(_stage_runs(stages), names):
                candidate = (*best[:low], *(name,) * (high - low), *best[high:])
                if candidate not in known and still_going():
                    known[candidate] = value(candidate)
                if known.get(candidate, math.inf) < known[best] * (1 - 1e-9):
                    best, better = candidate, True
        known[best] *= 1 - 1e-12  # the result of a search is sorted before choices that it passed
    ends = [choice for choice, time_s in known.items() if math.isfinite(time_s)]
    return sorted(ends, key=lambda choice: known[choice])


def _stage_runs(stages: int) -> list[tuple[int, int]]:
    """Return [first, last) of every first run of stages, every last run, and every single stage."""
    ahead = [(0, stop) for stop in range(1, stages)]
    return [*ahead, *((start, stages) for start in range(1, stages)), *((stage, stage + 1) for stage in range(stages))]
