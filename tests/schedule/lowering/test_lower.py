"""Lowering: its output is valid, cannot hang, keeps the computed order, and costs no time over the ideal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from tests.support.random_schedules import cases

from pipefit.errors import ScheduleError
from pipefit.schedule import (
    FAMILIES,
    ScheduleProblem,
    chain_edges,
    check_schedule,
    find_deadlock,
    format_lanes,
    linear_placement,
    lower_schedule,
    vee_placement,
)
from pipefit.schedule.actions import COMPUTE
from pipefit.schedule.check.deadlock import channel_cells, message_name
from pipefit.schedule.problem import uniform_costs
from pipefit.simulate import simulate_schedule


@settings(max_examples=300, deadline=None)
@given(cases())
def test_any_lowered_schedule_is_valid_and_cannot_hang(case) -> None:
    schedule, edges, costs = case
    check_schedule(schedule, edges)
    for times in (costs, replace(costs, receives_ahead=True), None):
        lowered = lower_schedule(schedule, edges, times)
        check_schedule(lowered, edges)
        assert find_deadlock(lowered) is None
        for lane, full in zip(schedule.lanes, lowered.lanes, strict=True):
            assert tuple(action for action in full if action.kind in COMPUTE) == lane


@settings(max_examples=200, deadline=None)
@given(cases())
def test_both_ends_of_a_channel_have_one_order(case) -> None:
    schedule, edges, costs = case
    for ahead in (False, True):
        lowered = lower_schedule(schedule, edges, replace(costs, receives_ahead=ahead))
        lanes = lowered.lanes
        for sends, receives in channel_cells(lowered).values():
            assert [message_name(lanes[a][b]) for a, b in sends] == [message_name(lanes[a][b]) for a, b in receives]


@settings(max_examples=200, deadline=None)
@given(cases())
def test_receives_are_posted_in_time(case) -> None:
    """No transfer waits for its RECV, and none is posted before the action that runs when it starts."""
    schedule, edges, costs = case
    lowered = lower_schedule(schedule, edges, costs, optimizer=False, reductions=())
    timeline = simulate_schedule(lowered, costs)
    for lane, actions in enumerate(lowered.lanes):
        for step, action in enumerate(actions):
            if action.kind.startswith("RECV"):
                posted, sent = timeline.starts_s[lane][step], _sent(timeline, action)
                assert posted <= sent
                running = next((s for s in range(step, len(actions)) if actions[s].kind in COMPUTE), None)
                assert running is not None and timeline.stops_s[lane][running] >= sent


@settings(max_examples=200, deadline=None)
@given(cases())
def test_receives_are_posted_before_the_message_ahead_is_used(case) -> None:
    """Of every lane that sends here, if asked for; nothing else changes, and nothing takes longer."""
    schedule, edges, costs = case
    plain, ahead = (lower_schedule(schedule, edges, replace(costs, receives_ahead=flag)) for flag in (False, True))
    for one, other in zip(plain.lanes, ahead.lanes, strict=True):
        same = [[a for a in lane if not a.kind.startswith("RE")] for lane in (one, other)]  # REDUCE follows SENDs
        assert same[0] == same[1]
        user = {("F" if a.kind == "F" else "B", *a[1:4]): i for i, a in enumerate(other) if a.kind in ("F", "I", "B")}
        uses: dict[int, int] = {}
        for index, action in enumerate(other):
            if action.kind.startswith("RECV"):
                sender, use = schedule.placement[action.peer], user[action.kind[-1], *action[1:4]]
                assert index < uses.get(sender, index + 1) or uses[sender] == use
                assert _work_before(other, action) <= _work_before(one, action)
                uses[sender] = use
    assert simulate_schedule(ahead, costs).makespan_s <= simulate_schedule(plain, costs).makespan_s


def _work_before(actions, receive) -> int:
    """How much a lane does before it posts a receive."""
    return sum(not action.kind.startswith("RECV") for action in actions[: actions.index(receive)])


def _sent(timeline, receive) -> float:
    """When the lane of the sender reached the SEND: the stop of the producer."""
    for lane, actions in enumerate(timeline.schedule.lanes):
        for step, action in enumerate(actions):
            if action.kind.startswith("SEND") and message_name(action) == message_name(receive):
                made = next(s for s in range(step, -1, -1) if actions[s].kind in COMPUTE)
                return float(timeline.stops_s[lane][made])
    raise AssertionError(receive)


def test_a_lane_reads_as_expected() -> None:
    schedule = lower_schedule(
        FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(2), microbatches=2)),
        zero=(1,),
        tied={"emb": (0, 1)},
    )
    assert format_lanes(schedule.lanes) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE 0REDUCE:emb NORM STEP",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE 1REDUCE:emb NORM STEP 1GATHER",
    )


def test_two_lanes_that_finish_together_do_not_both_send_first() -> None:
    """Under unit times neighbours of 1F1B end at the same moments all the time: one SEND goes behind a RECV."""
    schedule = lower_schedule(FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(3), microbatches=5)))
    assert (
        "1RECV_B2 1SEND_F3" in format_lanes(schedule.lanes)[1] or "1RECV_B1 1SEND_F2" in format_lanes(schedule.lanes)[1]
    )
    assert find_deadlock(schedule) is None


def test_the_turn_of_a_v_is_not_transferred() -> None:
    schedule = lower_schedule(FAMILIES["gpipe"](ScheduleProblem(placement=vee_placement(2), microbatches=2)))
    assert not any(action.stage == 1 and action.peer == 2 for _, _, action in schedule)
    assert any(action.stage == 0 and action.peer == 1 for _, _, action in schedule)


def test_what_a_lowering_leaves_out() -> None:
    computed = FAMILIES["gpipe"](ScheduleProblem(placement=linear_placement(2), microbatches=2))
    kinds = {action.kind for _, _, action in lower_schedule(computed, optimizer=False, reductions=(1,))}
    assert kinds == {"F", "B", "SEND_F", "SEND_B", "RECV_F", "RECV_B", "REDUCE"}
    reduced = [action.stage for _, _, action in lower_schedule(computed, reductions=(1,)) if action.kind == "REDUCE"]
    assert reduced == [1]


def test_lowering_twice_is_refused() -> None:
    lowered = lower_schedule(FAMILIES["gpipe"](ScheduleProblem(placement=linear_placement(2), microbatches=2)))
    with pytest.raises(ScheduleError, match="lowered already"):
        lower_schedule(lowered)


def test_an_edge_without_cost_is_named() -> None:
    computed = FAMILIES["gpipe"](ScheduleProblem(placement=linear_placement(3), microbatches=2))
    costs = uniform_costs(linear_placement(3), chain_edges(2))
    with pytest.raises(ScheduleError, match=r"(?s)no entry for an edge.*stage 1 -> stage 2"):
        lower_schedule(computed, costs=costs)
