"""The conformance suite of schedule families: every file in families/ runs through all of this unasked."""

from __future__ import annotations

import pytest

from pipefit.errors import ScheduleError
from pipefit.schedule import (
    FAMILIES,
    ScheduleProblem,
    check_schedule,
    find_deadlock,
    find_family,
    format_lanes,
    linear_placement,
    lower_schedule,
    vee_placement,
)
from pipefit.schedule.actions import parse_lanes

SHAPES = [
    (1, 1, 1),
    (1, 5, 2),
    (2, 1, 1),
    (2, 7, 1),
    (3, 2, 3),
    (4, 4, 1),
    (4, 9, 2),
    (7, 3, 1),
    (8, 16, 1),
    (16, 5, 4),
]


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_family_makes_valid_schedules(name: str, shape: tuple[int, int, int]) -> None:
    devices, microbatches, slices = shape
    made = FAMILIES[name]
    problem = ScheduleProblem(placement=made.placement(devices), microbatches=microbatches, slices=slices)
    if microbatches * slices < made.least_units(devices):
        with pytest.raises(
            ScheduleError, match=rf"(?s)microbatches.*seen: {microbatches} microbatches.*allowed: at le"
        ):
            made(problem)
        return
    schedule = made(problem)
    assert schedule.name == name
    assert (schedule.placement, schedule.microbatches, schedule.slices) == (problem.placement, microbatches, slices)
    assert made(problem) == schedule
    check_schedule(schedule)
    assert parse_lanes(format_lanes(schedule.lanes)) == schedule.lanes
    lowered = lower_schedule(schedule)
    check_schedule(lowered)
    assert find_deadlock(lowered) is None
    assert parse_lanes(format_lanes(lowered.lanes)) == lowered.lanes


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_follows_the_dag(name: str) -> None:
    """Two modules: stages 0-1 and 2-3 both feed stage 4, and a skip from 0 to 5."""
    edges = ((0, 1, ""), (1, 4, ""), (2, 3, ""), (3, 4, "image"), (4, 5, ""), (0, 5, "skip"))
    made = FAMILIES[name]
    devices = next(devices for devices in range(1, 7) if len(made.placement(devices)) == 6)
    schedule = made(ScheduleProblem(placement=made.placement(devices), microbatches=7, edges=edges))
    check_schedule(schedule, edges)
    assert find_deadlock(lower_schedule(schedule, edges)) is None


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize(
    "placement", [linear_placement(3), vee_placement(3), (0, 1, 2, 0, 1, 2), (0, 0, 1, 2, 1), (2, 1, 0)]
)
def test_a_family_refuses_what_it_is_not_written_for(name: str, placement: tuple[int, ...]) -> None:
    """Any placement: a valid schedule, or an error that says which ones it is written for and what takes any."""
    try:
        schedule = FAMILIES[name](ScheduleProblem(placement=placement, microbatches=6))
    except ScheduleError as error:
        text = error.full_text()
        assert "is written for" in text and "where: placement" in text and "use gpipe, which takes any" in text
        assert placement != FAMILIES[name].placement(3)
    else:
        check_schedule(schedule)
        assert schedule.placement == placement


def test_gpipe_and_1f1b_as_the_papers_draw_them() -> None:
    problem = ScheduleProblem(placement=linear_placement(3), microbatches=4)
    assert format_lanes(FAMILIES["gpipe"](problem).lanes)[1] == "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    assert format_lanes(FAMILIES["1f1b"](problem).lanes) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )


def test_slices_go_forward_ascending_and_backward_descending() -> None:
    problem = ScheduleProblem(placement=linear_placement(2), microbatches=2, slices=2)
    assert format_lanes(FAMILIES["gpipe"](problem).lanes)[0] == "0F0 0F0/1 0F1 0F1/1 0B0/1 0B0 0B1/1 0B1"
    assert format_lanes(FAMILIES["1f1b"](problem).lanes)[1] == "1F0 1F0/1 1B0/1 1F1 1B0 1F1/1 1B1/1 1B1"


def test_gpipe_takes_a_v_placement() -> None:
    schedule = FAMILIES["gpipe"](ScheduleProblem(placement=vee_placement(3), microbatches=2))
    check_schedule(schedule)
    assert format_lanes(schedule.lanes)[2] == "2F0 2F1 3F0 3F1 3B0 3B1 2B0 2B1"


def test_1f1b_refuses_a_lane_with_two_stages() -> None:
    with pytest.raises(ScheduleError, match=r"(?s)one stage per lane.*lane 0 holds stages 0, 3.*use gpipe"):
        FAMILIES["1f1b"](ScheduleProblem(placement=vee_placement(2), microbatches=2))


def test_an_unknown_family_lists_the_known() -> None:
    with pytest.raises(ScheduleError, match=r"(?s)schedule is unknown.*'1f2b'.*did you mean '1f1b'") as caught:
        find_family("1f2b")
    assert f"allowed: {', '.join(sorted(FAMILIES))}" in caught.value.full_text()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"microbatches": 0}, r"(?s)at least one microbatch.*seen: 0"),
        ({"slices": 0}, r"(?s)at least one slice.*seen: 0"),
        ({"placement": ()}, "numbered from 0"),
        ({"placement": (0, 2)}, "numbered from 0"),
        ({"edges": ((1, 0, ""),)}, r"(?s)to a later one.*seen: 1 -> 0.*0 <= source < target < 2"),
        ({"edges": ((0, 1, ""), (0, 1, ""))}, "given twice"),
        ({"edges": ((0, 5, "skip"),)}, r"0 -> 5 \(skip\)"),
    ],
)
def test_a_wrong_problem_is_explained(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        ScheduleProblem(**({"placement": (0, 1), "microbatches": 2} | wrong))
