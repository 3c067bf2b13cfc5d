"""Every rule of `check_schedule`, by the text of its error and the drawing in it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.random_schedules import cases

from pipefit.errors import ScheduleError
from pipefit.schedule import Action, Schedule, check_schedule, lower_schedule, parse_lanes
from pipefit.schedule.check.rules import edges_of
from pipefit.schedule.lowering.frozen import frozen_stages, without_backward


def schedule_of(*lanes: str, placement: tuple[int, ...] = (0, 1), microbatches: int = 2, slices: int = 1) -> Schedule:
    return Schedule(
        name="case", placement=placement, microbatches=microbatches, slices=slices, lanes=parse_lanes(lanes)
    )


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
LOWERED = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE NORM STEP",
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE NORM STEP",
)


def test_the_good_ones_pass() -> None:
    check_schedule(schedule_of(*GOOD))
    check_schedule(schedule_of(*LOWERED))
    check_schedule(schedule_of("0F0 0F1 0I1 0B0 0W1", "1F0 1F1 1I1 1W1 1B0"))
    check_schedule(schedule_of("0F0 1F0 1B0 0B0", placement=(0, 0), microbatches=1))


@pytest.mark.parametrize(
    ("lanes", "says", "drawn"),
    [
        (("0F0 0F1 0B0", GOOD[1]), "Lane 0 ends without 0B1 (or 0I1 and 0W1)", ">(end)<"),
        (("0F0 0B0 0B1", GOOD[1]), "0B1 stands before its forward 0F1", ">0B1<"),
        (("0F0 0B0", GOOD[1]), "Lane 0 ends without 0F1", ">(end)<"),
        (("0F0 0F0 0F1 0B0 0B1", GOOD[1]), "0F0 stands here for the second time", "0F0 >0F0< 0F1"),
        (("0F0 0F1 0B0 0B1 0I1", GOOD[1]), "0I1 computes a gradient that 0B1 has computed already", ">0I1<"),
        (("0F0 0F1 0I0 0B0", GOOD[1]), "0B0 computes a gradient that 0I0 has computed already", ">0B0<"),
        (("0F0 0F1 0B0 0W0 0B1", GOOD[1]), "0W0 stands beside 0B0", ">0W0<"),
        (("0F0 0W0 0I0 0F1 0B1", GOOD[1]), "0W0 stands before its input gradient 0I0", ">0W0<"),
        (("0F0 0F1 0I0 0B1", GOOD[1]), "Lane 0 ends without 0W0", ">(end)<"),
        (("0F0 1F0 0F1 0B0 0B1", GOOD[1]), "Stage 1 belongs to lane 1, not to lane 0", ">1F0<"),
        (("0F0 0F1 0B0 0B1 7F0", GOOD[1]), "There is no stage 7: the schedule has 2", ">7F0<"),
        (("0F0 0F1 0B0 0B1 0F2", GOOD[1]), "There is no microbatch 2: the schedule has 2", ">0F2<"),
        (("0F0 0F1 0B0 0B1 0F1/1", GOOD[1]), "There is no slice 1: a microbatch has 1", ">0F1/1<"),
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), "wait for each other: no order", ">0B0<"),
        ((LOWERED[0].replace("0SEND_F0 ", ""), LOWERED[1]), "0SEND_F0 is missing; it must stand behind", ">0F0<"),
        ((LOWERED[0].replace("0RECV_B1 ", ""), LOWERED[1]), "0RECV_B1 is missing; it must stand before", ">0B1<"),
        (
            (LOWERED[0].replace("0F0 0SEND_F0", "0SEND_F0 0F0"), LOWERED[1]),
            "stands before 0F0, which makes",
            ">0SEND_F0<",
        ),
        (
            (LOWERED[0].replace("0RECV_B0 0B0", "0B0 0RECV_B0"), LOWERED[1]),
            "stands behind 0B0, which uses",
            ">0RECV_B0<",
        ),
        ((LOWERED[0] + " 0SEND_F0", LOWERED[1]), "0SEND_F0 stands here for the second time", ">0SEND_F0<"),
        ((LOWERED[0] + " 0SEND_F0:x", LOWERED[1]), "0 -> 1", ""),
        ((LOWERED[0] + " 0SEND_F0>9", LOWERED[1]), "There is no stage 9 to exchange with", ">0SEND_F0>9<"),
        (("0REDUCE " + LOWERED[0].replace(" 0REDUCE", ""), LOWERED[1]), "stands before 0B1, which adds", ">0REDUCE<"),
        ((LOWERED[0].replace("NORM STEP", "STEP NORM"), LOWERED[1]), "NORM stands behind STEP", ">NORM<"),
        ((LOWERED[0].replace("0REDUCE NORM", "NORM 0REDUCE"), LOWERED[1]), "stands behind NORM or STEP", ">0REDUCE<"),
        ((LOWERED[0] + " STEP", LOWERED[1]), "STEP stands here for the second time", ">STEP<"),
        (("NORM " + LOWERED[0].replace(" NORM", ""), LOWERED[1]), "the gradients are not complete", ">NORM<"),
    ],
)
def test_a_broken_rule_is_told_and_drawn(lanes: tuple[str, ...], says: str, drawn: str) -> None:
    if says == "0 -> 1":  # a tensor that the given edges do not have
        says, drawn = "There is no edge from stage 0 to stage 1 for 0SEND_F0:x", ">0SEND_F0:x<"
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule_of(*lanes), edges=((0, 1, ""),))
    text = caught.value.full_text()
    assert says in text
    assert drawn in text
    row, arrow = _arrow(text)
    assert row[arrow] == ">" and "^" * len(drawn.split(">")[0] or ">") in text


def _arrow(text: str) -> tuple[str, int]:
    """The line above the arrow, and the column where the arrow starts."""
    lines = text.splitlines()
    index = next(i for i, line in enumerate(lines) if set(line.strip()) == {"^"})
    return lines[index - 1], lines[index].index("^")


def test_slices_must_go_in_order() -> None:
    with pytest.raises(ScheduleError, match=r"0F0/1 stands before the forward of the slice before it"):
        check_schedule(schedule_of("0F0/1 0F0 0B0/1 0B0", placement=(0,), microbatches=1, slices=2))
    with pytest.raises(ScheduleError, match=r"0B0 stands before the backward of the slice behind it"):
        check_schedule(schedule_of("0F0 0F0/1 0B0 0B0/1", placement=(0,), microbatches=1, slices=2))


def test_a_circle_through_the_turn_of_a_v_is_found() -> None:
    """Lane 1 wants the second half before the first: both stages are on it, so nothing crosses lanes there."""
    lanes = ("0F0 3F0 3B0 0B0", "2F0 1F0 2B0 1B0")
    with pytest.raises(ScheduleError, match=r"(?s)waits for 2F0 of lane 1.*waits for 1F0 of lane 1"):
        check_schedule(schedule_of(*lanes, placement=(0, 1, 1, 0), microbatches=1))


def test_the_drawing_clips_many_lanes_and_long_ones() -> None:
    lanes = [f"{i}F0 {i}F1 {i}F2 {i}F3 {i}F4 {i}F5 {i}B0 {i}B1 {i}B2 {i}B3 {i}B4 {i}B5" for i in range(40)]
    lanes[20] = lanes[20].replace("20F5", "20F4")
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule_of(*lanes, placement=tuple(range(40)), microbatches=6))
    text = caught.value.full_text()
    assert "where: lane 20, step 5" in text
    assert "lane 12 " in text and "lane 28 " in text and "lane 11 " not in text and "lane 29 " not in text
    assert "step" in text and "20B3" in text and "20B4" not in text and "20F0" not in text


def test_placement_and_lanes_must_agree() -> None:
    with pytest.raises(ScheduleError, match="placement does not fit the lanes"):
        check_schedule(schedule_of("0F0 0B0", placement=(0, 1), microbatches=1))


def test_a_transfer_within_a_lane_is_refused() -> None:
    with pytest.raises(ScheduleError, match="same lane: nothing is to be transferred"):
        check_schedule(schedule_of("0F0 0SEND_F0 1F0 1B0 0B0", placement=(0, 0), microbatches=1))


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_removing_or_doubling_any_action_is_noticed(case, seed: int) -> None:
    schedule, edges, costs = case
    rng = random.Random(seed)
    lowered = lower_schedule(schedule, edges, costs)
    check_schedule(lowered, edges)
    lanes = [list(lane) for lane in lowered.lanes]
    lane = rng.choice(lanes)
    index = rng.randrange(len(lane))
    if rng.random() < 0.5:
        lane.insert(rng.randint(index, len(lane)), lane[index])
    elif lane[index].kind in ("REDUCE", "NORM", "STEP"):
        return
    else:
        del lane[index]
    broken = Schedule(
        name="broken",
        placement=lowered.placement,
        microbatches=lowered.microbatches,
        slices=lowered.slices,
        lanes=tuple(map(tuple, lanes)),
    )
    with pytest.raises(ScheduleError):
        check_schedule(broken, edges)


def test_edges_are_read_from_the_transfers() -> None:
    edges = ((0, 2, "skip"), (0, 1, ""), (1, 2, ""))
    computed = schedule_of("0F0 0B0", "1F0 1B0", "2F0 2B0", placement=(0, 1, 2), microbatches=1)
    assert set(edges_of(lower_schedule(computed, edges))) == set(edges)
    assert edges_of(computed) == ((0, 1, ""), (1, 2, ""))
    assert Action("SEND_F", 0, 0, 0, 2, "skip") in lower_schedule(computed, edges).lanes[0]


def test_frozen_stages_may_do_without_a_backward_and_get_no_gradient() -> None:
    whole = schedule_of(*GOOD)
    bare = without_backward(whole, {0})
    assert bare.lanes[0] == parse_lanes(["0F0 0F1"])[0] and bare.lanes[1] == whole.lanes[1]
    check_schedule(bare, frozen={0})
    lowered = lower_schedule(bare)
    check_schedule(lowered, frozen={0})
    kinds = {(action.kind, action.stage) for _, _, action in lowered}
    assert not kinds & {("SEND_B", 1), ("RECV_B", 0), ("REDUCE", 0)}
    with pytest.raises(ScheduleError, match=r"Lane 0 ends without 0B0"):
        check_schedule(lowered)
    sent = "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE NORM STEP"
    with pytest.raises(
        ScheduleError, match=r"1SEND_B0 moves a gradient to stage 0, which is frozen and has no backward"
    ):
        check_schedule(schedule_of("0F0 0SEND_F0 0F1 0SEND_F1 NORM STEP", sent), frozen={0})
    check_schedule(schedule_of(*LOWERED), frozen={0})  # it may have one all the same


def test_what_is_trained_reaches_all_behind_it() -> None:
    edges = ((0, 2, ""), (1, 2, ""), (2, 3, ""))
    assert frozen_stages(4, edges, [1]) == {0}
    assert frozen_stages(4, edges, [3]) == {0, 1, 2}
    assert frozen_stages(4, edges, []) == {0, 1, 2, 3}
