"""Slicings, schedules and the simulator together, against what an event model that shares no code with them found.

A stage takes 1 for the linear work of a sequence, r for its attention, and o for every slice; a third of it forward.
Times are multiples of the work of all sequences, peaks are in sequences on the first of K stages; m sequences.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipefit.cost.types import ActionTable, Array, Ints
from pipefit.plan.slicing.count import step_s
from pipefit.plan.slicing.cuts import TimeOf, equal_cost, slice_times, uniform_slices
from pipefit.plan.slicing.terapipe import best_slicing
from pipefit.schedule.families import find_family
from pipefit.schedule.problem import ScheduleProblem, linear_placement, uniform_costs
from pipefit.simulate import simulate_schedule

LENGTH, CELLS = 6144, 96


def model(ratio: float, overhead: float) -> TimeOf:
    def time_of(tokens: Ints, past: Ints) -> Array:
        return overhead + tokens / LENGTH + ratio * tokens * (2.0 * past + tokens) / LENGTH**2

    return time_of


def run(name: str, stages: int, sequences: int, slices: tuple[int, ...], time_of: TimeOf) -> tuple[float, float]:
    """(time, peak of the first stage)."""
    seconds = slice_times(slices, time_of)[None, None, :]
    share = np.asarray(slices)[None, None, :] / LENGTH
    actions = {"F": _table(seconds / 3, share), "B": _table(2 * seconds / 3, -share)}
    costs = replace(uniform_costs(linear_placement(stages)), actions=actions)
    problem = ScheduleProblem(placement=linear_placement(stages), microbatches=sequences, slices=len(slices))
    timeline = simulate_schedule(find_family(name)(problem), costs)
    return timeline.makespan_s, float(timeline.peak_bytes[0])


@pytest.mark.parametrize(
    ("ratio", "overhead", "stages", "sequences", "uncut", "best", "slices", "held", "program"),
    [
        (0.1, 0.02, 8, 8, 1.909, 1.268, 7, 2.04, 1.273),
        (0.25, 0.005, 8, 8, 1.882, 1.122, 15, 1.55, 1.127),
        (1.33, 0.005, 8, 8, 1.879, 1.089, 20, 1.59, 1.093),
        (1.33, 0.02, 16, 4, 4.791, 1.391, 21, 2.0, 1.413),
    ],
)
def test_the_event_model_agrees(
    ratio: float,
    overhead: float,
    stages: int,
    sequences: int,
    uncut: float,
    best: float,
    slices: int,
    held: float,
    program: float,
) -> None:
    time_of, work = model(ratio, overhead), sequences * (1 + ratio)
    assert run("1f1b", stages, sequences, (LENGTH,), time_of)[0] / work == pytest.approx(uncut, abs=1e-3)
    near = {
        count: run("1f1b", stages, sequences, equal_cost(LENGTH, count, time_of), time_of)
        for count in range(slices - 2, slices + 3)
    }
    number = min(near, key=lambda count: near[count])
    numbers = np.arange(1, 65)
    least = int(numbers[np.argmin(step_s(stages, sequences, numbers, 1 + ratio + overhead * numbers))])
    assert abs(number - slices) <= 1 and abs(number - least) <= 1
    assert near[number][0] / work == pytest.approx(best, abs=3e-3)
    assert near[slices][1] == pytest.approx(held, abs=0.02)
    first = best_slicing(LENGTH, stages, time_of, multiple=LENGTH // CELLS, sequences=sequences)
    theirs_s, all_held = run("gpipe", stages, sequences, first.slices, time_of)
    assert theirs_s == pytest.approx(first.step_s), "equation 5 is the time of all forwards first"
    assert theirs_s / work == pytest.approx(program, abs=3e-3) and all_held == pytest.approx(sequences)
    assert near[number][0] < theirs_s
    even_s = run("1f1b", stages, sequences, uniform_slices(LENGTH, slices), time_of)[0]
    assert even_s > (1.05 if ratio < 1 else 1.2) * near[slices][0], "later slices take longer"


def _table(time_s: Array, held: Array) -> ActionTable:
    return ActionTable(time_s=time_s, held_bytes=held, peak_bytes=np.zeros((1, 1, 1)))
