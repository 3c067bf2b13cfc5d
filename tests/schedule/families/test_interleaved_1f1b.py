"""Interleaved 1F1B: the order of Megatron-LM, its closed forms, and every count of microbatches."""

from __future__ import annotations

import pytest

from pipefit.errors import ScheduleError
from pipefit.schedule import (
    FAMILIES,
    ScheduleProblem,
    check_schedule,
    find_deadlock,
    format_lanes,
    linear_placement,
    lower_schedule,
    uniform_costs,
    vee_placement,
)
from pipefit.schedule.families.interleaved_1f1b import placement
from pipefit.simulate import simulate_schedule

build = FAMILIES["interleaved-1f1b"]


def megatron_order(lane: int, devices: int, turns: int, microbatches: int) -> str:
    """The order of arXiv 2104.04473 by its own arithmetic: the k-th forward of a lane is of turn (k mod dv) div d."""

    def place(k: int, forward: bool) -> str:
        turn, microbatch = k % (devices * turns) // devices, k // (devices * turns) * devices + k % devices
        turn = turn if forward else turns - 1 - turn
        return f"{turn * devices + lane}{'F' if forward else 'B'}{microbatch}"

    total = microbatches * turns
    warm = min(total, 2 * (devices - lane - 1) + (turns - 1) * devices)
    order = [place(k, True) for k in range(warm)]
    for k in range(total - warm):
        order += [place(warm + k, True), place(k, False)]
    return " ".join(order + [place(k, False) for k in range(total - warm, total)])


@pytest.mark.parametrize(("devices", "turns", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (8, 3, 64)])
def test_it_is_the_order_of_the_paper(devices: int, turns: int, microbatches: int) -> None:
    schedule = build(ScheduleProblem(placement=placement(devices, turns), microbatches=microbatches))
    lines = format_lanes(schedule.lanes)
    assert lines == tuple(megatron_order(lane, devices, turns, microbatches) for lane in range(devices))


@pytest.mark.parametrize(("d", "v", "m"), [(1, 2, 3), (2, 2, 6), (4, 2, 8), (4, 3, 4), (8, 3, 64)])
def test_time_and_memory_are_the_closed_forms(d: int, v: int, m: int) -> None:
    costs = uniform_costs(placement(d, v), forward_s=1.0, input_s=1.0, weight_s=1.0)
    timeline = simulate_schedule(build(ScheduleProblem(placement=placement(d, v), microbatches=m)), costs)
    assert timeline.makespan_s == (m * v + d - 1) * 3
    alive = [min(m * v, (v - 1) * d + 2 * (d - 1 - lane) + 1) for lane in range(d)]
    assert timeline.peak_bytes.tolist() == alive


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("turns", [2, 3])
def test_any_number_of_microbatches_and_slices_runs(devices: int, turns: int) -> None:
    for microbatches in range(1, 3 * devices + 2):
        for slices in (1, 2, 3):
            problem = ScheduleProblem(placement=placement(devices, turns), microbatches=microbatches, slices=slices)
            schedule = build(problem)
            check_schedule(schedule)
            if microbatches % 3 == 1:
                assert find_deadlock(lower_schedule(schedule)) is None


def test_uneven_groups_are_faster_than_1f1b_on_whole_stages() -> None:
    """9 microbatches on 4 lanes: closer to the even case than to plain 1F1B on stages twice as long."""
    looped = simulate_schedule(
        build(ScheduleProblem(placement=placement(4), microbatches=9)), uniform_costs(placement(4))
    )
    whole = uniform_costs(linear_placement(4), forward_s=2.0, input_s=2.0, weight_s=2.0)
    plain = simulate_schedule(FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(4), microbatches=9)), whole)
    assert looped.makespan_s == (9 * 2 + 3) * 3 < plain.makespan_s


def test_one_stage_a_lane_is_1f1b() -> None:
    problem = ScheduleProblem(placement=linear_placement(4), microbatches=6)
    assert build(problem).lanes == FAMILIES["1f1b"](problem).lanes


def test_a_v_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"(?s)lanes in turn.*seen: 0,1,1,0.*for example 0,1,0,1.*use gpipe"):
        build(ScheduleProblem(placement=vee_placement(2), microbatches=2))
