"""Receive buffers count: never worse than a family that fits with them, and within the limit by the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from tests.schedule.fit.test_search import uneven, verified, with_buffers

from pipefit.schedule import ScheduleProblem, find_family, lower_schedule, vee_placement
from pipefit.schedule.fit.search import fit_schedule
from pipefit.simulate import simulate_schedule

CASES = [
    (name, devices, seed)
    for name in ("v-min", "v-half", "v-zb", "zb-v", "1f1b-v")
    for devices, seed in ((2, 0), (3, 1), (4, 2), (5, 3))
]


def limited(name: str, devices: int, seed: int, even: bool) -> tuple[ScheduleProblem, float]:
    """A V whose limits are what a family needs, on each lane or on the worst, and the time of that family."""
    size = (0.05, 0.1, 0.25)[seed % 3]
    costs = with_buffers(uneven(devices, seed, forward_s=28, input_s=28, weight_s=20, transfer_s=4), size, 2.0 * even)
    problem = ScheduleProblem(placement=vee_placement(devices), microbatches=8, costs=costs)
    lowered = lower_schedule(find_family(name)(problem), problem.stage_edges, costs, reductions=(), optimizer=False)
    timeline = simulate_schedule(lowered, costs)
    peaks = timeline.peak_bytes
    limit = tuple((np.full(devices, peaks.max()) if even else peaks).tolist())
    return ScheduleProblem(
        placement=vee_placement(devices), microbatches=8, costs=costs, limit_bytes=limit
    ), timeline.makespan_s


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(("name", "devices", "seed"), CASES)
def test_never_worse_than_a_family_that_fits(name: str, devices: int, seed: int, even: bool) -> None:
    """Its own memory is the limit: the family itself always fits."""
    problem, family_s = limited(name, devices, seed, even)
    found = fit_schedule(problem, moves=1000)
    verified(problem, found)
    assert found.time_s <= family_s * (1 + 1e-12)
    assert "one microbatch" not in found.how


def test_moves_help_where_buffers_fill_the_limit() -> None:
    """From the family that just fits the search goes on, within the limit."""
    problem, family_s = limited("v-min", 4, 2, True)
    few, many = fit_schedule(problem, moves=0), fit_schedule(problem, moves=20_000)
    verified(problem, many)
    assert few.time_s <= family_s and many.time_s < 0.97 * few.time_s
    assert many == fit_schedule(problem, moves=20_000)
