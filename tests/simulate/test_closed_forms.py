"""GPipe and 1F1B against what the papers write down for equal stages."""

from __future__ import annotations

import numpy as np
import pytest

from pipefit.schedule import FAMILIES, ScheduleProblem, linear_placement, lower_schedule, uniform_costs
from pipefit.simulate import simulate_schedule

GRID = [(d, m) for d in (1, 2, 3, 4, 8, 13) for m in (1, 2, 3, 7, 16, 33)]


@pytest.mark.parametrize(("d", "m"), GRID)
@pytest.mark.parametrize(("f", "b"), [(1.0, 2.0), (3.0, 5.0), (2.0, 1.5)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("lowered", [False, True])
def test_time_bubble_and_peaks(name: str, d: int, m: int, f: float, b: float, lowered: bool) -> None:
    costs = uniform_costs(linear_placement(d), forward_s=f, input_s=b / 2, weight_s=b / 2)
    schedule = FAMILIES[name](ScheduleProblem(placement=linear_placement(d), microbatches=m))
    timeline = simulate_schedule(lower_schedule(schedule, costs=costs) if lowered else schedule, costs)
    assert timeline.makespan_s == (m + d - 1) * (f + b)
    assert timeline.bubble_share == pytest.approx((d - 1) / (m + d - 1), abs=1e-12)
    assert timeline.idle_s == pytest.approx([(d - 1) * (f + b)] * d)
    alive = [m if name == "gpipe" else min(m, d - i) for i in range(d)]
    assert timeline.peak_bytes.tolist() == alive
    assert sum(span.stop_s - span.start_s for span in timeline.critical_path) == pytest.approx(timeline.makespan_s)


@pytest.mark.parametrize(("d", "m", "s"), [(2, 1, 4), (3, 2, 2), (4, 4, 3), (8, 2, 8), (5, 1, 16)])
def test_slices_shrink_the_bubble_and_the_peak(d: int, m: int, s: int) -> None:
    """m s units of equal cost in place of m: time (m s + d - 1)(f + b), peak min(m s, d - i + s - 1) slices."""
    costs = uniform_costs(linear_placement(d), forward_s=1, input_s=1, weight_s=1)
    for name in ("gpipe", "1f1b"):
        schedule = FAMILIES[name](ScheduleProblem(placement=linear_placement(d), microbatches=m, slices=s))
        timeline = simulate_schedule(schedule, costs)
        assert timeline.makespan_s == (m * s + d - 1) * 3
        peak = [m * s if name == "gpipe" else min(m * s, d - i + s - 1) for i in range(d)]
        assert timeline.peak_bytes.tolist() == peak


@pytest.mark.parametrize(("d", "m"), GRID)
def test_gpipe_with_transfers(d: int, m: int) -> None:
    """Latency c is paid once a hop and way, as long as the port is not what limits: (m + d - 1)(f + b) + 2(d - 1)c."""
    costs = uniform_costs(linear_placement(d), forward_s=2, input_s=1, weight_s=2, transfer_s=0.75, port_s=0.5)
    schedule = FAMILIES["gpipe"](ScheduleProblem(placement=linear_placement(d), microbatches=m))
    timeline = simulate_schedule(schedule, costs)
    assert timeline.makespan_s == (m + d - 1) * 5 + 2 * (d - 1) * 0.75


def test_a_port_that_limits() -> None:
    """Two stages, GPipe: the port takes longer than the compute, so the transfers of m forwards follow each other,
    then those of m backwards: f + m p + f + m b ... with p = 5, f = 1, b = 2."""
    costs = uniform_costs(linear_placement(2), forward_s=1, input_s=1, weight_s=1, transfer_s=5, port_s=5)
    m = 6
    timeline = simulate_schedule(
        FAMILIES["gpipe"](ScheduleProblem(placement=linear_placement(2), microbatches=m)), costs
    )
    forward_done = 1 + m * 5 + 1
    assert timeline.makespan_s == forward_done + 2 + m * 5 + 2
    assert timeline.port_s.tolist() == [m * 5, m * 5]


def test_last_stage_with_a_head() -> None:
    """1F1B, two stages, the last 1.5 times as slow and m large: its work plus the first forward and last backward."""
    costs = uniform_costs(linear_placement(2), forward_s=2, input_s=2, weight_s=2)
    for name, table in costs.actions.items():
        times = np.repeat(table.time_s, 2, axis=0) * np.array([1.0, 1.5]).reshape(2, 1, 1)
        costs.actions[name] = type(table)(time_s=times, held_bytes=table.held_bytes, peak_bytes=table.peak_bytes)
    m = 20
    timeline = simulate_schedule(
        FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(2), microbatches=m)), costs
    )
    assert timeline.makespan_s == 2 + m * 9 + 4
    assert timeline.busy_s.tolist() == [m * 6, m * 9]
    assert timeline.idle_s.tolist() == [2 + m * 9 + 4 - m * 6, 6]


def test_exposed_transfer_is_what_waiting_costs() -> None:
    """Without slack every hop of the fill is exposed; overlapped transfers are not."""
    costs = uniform_costs(linear_placement(2), forward_s=4, input_s=2, weight_s=2, transfer_s=1, port_s=1)
    timeline = simulate_schedule(
        FAMILIES["gpipe"](ScheduleProblem(placement=linear_placement(2), microbatches=3)), costs
    )
    assert timeline.makespan_s == 4 * 8 + 2
    assert timeline.exposed_transfer_s.tolist() == [1, 1]
    free = simulate_schedule(
        FAMILIES["gpipe"](ScheduleProblem(placement=linear_placement(2), microbatches=3)),
        uniform_costs(linear_placement(2)),
    )
    assert free.exposed_transfer_s.tolist() == [0, 0]


def test_once_an_iteration() -> None:
    """Reductions overlap with the compute of the lane; NORM waits for all lanes; STEP and GATHER follow."""
    costs = uniform_costs(linear_placement(2), forward_s=1, input_s=1, weight_s=1)
    costs.reduce_s[:] = (4.0, 7.0)
    costs.step_s[:] = (0.5, 1.0)
    costs.gather_s[:] = (2.0, 3.0)
    schedule = lower_schedule(
        FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(2), microbatches=2)), costs=costs, zero=(0, 1)
    )
    timeline = simulate_schedule(schedule, costs)
    # Lane 1 computes until 7 and reduces until 14; lane 0 computes until 9 and reduces until 13.
    assert timeline.compute_end_s == 9
    norms = [timeline.starts_s[lane][[str(a) for a in schedule.lanes[lane]].index("NORM")] for lane in range(2)]
    assert norms == [14, 14]
    assert timeline.makespan_s == max(14 + 0.5 + 2, 14 + 1 + 3)
    path = [str(span.action) for span in timeline.critical_path]
    assert path == ["0F0", "0SEND_F0", "1F0", "1B0", "1F1", "1B1", "1REDUCE", "NORM", "STEP", "1GATHER"]


def test_an_empty_time_is_no_division_by_zero() -> None:
    costs = uniform_costs(linear_placement(2), forward_s=0, input_s=0, weight_s=0)
    timeline = simulate_schedule(
        FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(2), microbatches=2)), costs
    )
    assert (timeline.makespan_s, timeline.bubble_share) == (0.0, 0.0)
    assert len(timeline.critical_path) == 1
