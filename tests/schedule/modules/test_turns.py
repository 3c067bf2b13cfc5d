"""Stages that take turns at microbatches, or take several together: who has what, when it runs, what is refused."""

from __future__ import annotations

import pytest

from pipefit.errors import ScheduleError
from pipefit.schedule import check_schedule, lower_schedule
from pipefit.schedule.actions import RoundRobin, Schedule
from pipefit.schedule.check.deadlock import find_deadlock
from pipefit.schedule.families import find_family
from pipefit.schedule.lowering.messages import receive_windows
from pipefit.schedule.problem import ScheduleProblem, uniform_costs
from pipefit.simulate import simulate_schedule

EDGES = ((0, 2, ""), (1, 2, ""), (2, 3, ""))
"""Encoders 0 and 1 on the lanes of a pipeline of stages 2 and 3."""


def made(microbatches: int, multiple: int = 1) -> Schedule:
    beside = [RoundRobin(turn, 2, multiple) for turn in range(2)]
    problem = ScheduleProblem(
        placement=(0, 1, 0, 1), microbatches=microbatches, edges=EDGES, turns=(*beside, RoundRobin(), RoundRobin())
    )
    return find_family("gpipe")(problem)


def test_a_turn_takes_its_units() -> None:
    turn = RoundRobin(1, 3, 2)
    assert [m for m in range(14) if turn.takes_microbatch(m)] == [2, 3, 8, 9]
    assert [*turn.unit_starts(14)] == [2, 8] and turn.unit_start(9) == 8


def test_what_depends_on_a_turn_waits_for_the_stage_whose_turn_it_is() -> None:
    """By hand, forwards of a second and backwards of two: the encoder of lane 1 makes microbatch 1."""
    schedule = made(2)
    check_schedule(schedule, EDGES)
    assert [" ".join(map(str, lane)) for lane in schedule.lanes] == [
        "0F0 2F0 2F1 2B0 2B1 0B0",
        "1F1 3F0 3F1 3B0 3B1 1B1",
    ]
    late = uniform_costs(schedule.placement, EDGES, forward_s=(1, 3, 1, 1))
    for costs, starts in (
        (uniform_costs(schedule.placement, EDGES), ([0, 1, 2, 6, 8, 10], [0, 2, 3, 4, 6, 10])),
        (late, ([0, 1, 3, 7, 9, 11], [0, 3, 4, 5, 7, 11])),  # 3F0 waits for its lane, 2F1 for the other
    ):
        timeline = simulate_schedule(schedule, costs, EDGES)
        assert [each.tolist() for each in timeline.starts_s] == [*starts]
        lowered = lower_schedule(schedule, EDGES, costs)
        assert simulate_schedule(lowered, costs).compute_end_s == timeline.compute_end_s


@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_lowered_schedules_send_what_both_ends_take(multiple: int) -> None:
    schedule = made(12, multiple)
    lowered = lower_schedule(schedule, EDGES, tied={"tied.0.1": (0, 1)})
    check_schedule(lowered, EDGES)
    assert find_deadlock(lowered) is None
    own = [m for m in range(12) if m // multiple % 2]
    sent = [action for _, _, action in lowered if action.kind == "SEND_F" and action.stage == 1]
    assert [action.microbatch for action in sent] == own and {action.peer for action in sent} == {2}
    assert [a.microbatch for _, _, a in lowered if a.kind == "F" and a.stage == 1] == own[::multiple]
    into = receive_windows(lowered.lanes[1], lowered.turns)["RECV_B", 1, 2, ""]
    assert into >= multiple, "the gradients of a unit come before its backward"
    costs = uniform_costs(schedule.placement, EDGES, transfer_s=0.5, port_s=0.25)
    again = lower_schedule(schedule, EDGES, costs)
    assert simulate_schedule(again, costs).compute_end_s == simulate_schedule(schedule, costs, EDGES).compute_end_s


def test_the_memory_of_a_turn_is_that_of_its_own_microbatches() -> None:
    costs = uniform_costs((0, 1, 0, 1), EDGES)
    assert simulate_schedule(made(6), costs, EDGES).peak_bytes.tolist() == [
        9.0,
        9.0,
    ]  # 3 units of the encoder, 6 microbatches
    assert simulate_schedule(made(6, 3), costs, EDGES).peak_bytes.tolist() == [7.0, 7.0]


def test_turns_that_cannot_be_and_families_that_know_none() -> None:
    for turns, seen in (
        ((RoundRobin(2, 2),), "turn 2 of 2"),
        ((RoundRobin(0, 1, 4),), "4 of 6"),
        ((RoundRobin(3, 4, 2),), "turn 3 of 4, 2 of 6"),
    ):
        with pytest.raises(ScheduleError, match="no microbatch, or cannot take this number") as error:
            ScheduleProblem(placement=(0,), microbatches=6, turns=turns)
        assert seen in str(error.value)
    with pytest.raises(ScheduleError, match="for every stage, or for none"):
        ScheduleProblem(placement=(0, 1), microbatches=6, turns=(RoundRobin(),))
    with pytest.raises(ScheduleError, match=r"all take every microbatch(.|\n)*1f1b(.|\n)*gpipe"):
        find_family("1f1b")(
            ScheduleProblem(placement=(0, 1), microbatches=2, turns=(RoundRobin(0, 2), RoundRobin(1, 2)))
        )


def test_an_action_that_is_not_the_first_of_its_unit() -> None:
    schedule = made(4, 2)
    lanes = tuple(
        tuple(action._replace(microbatch=1) if action == ("F", 0, 0, 0, -1, "") else action for action in lane)
        for lane in schedule.lanes
    )
    moved = Schedule(
        name="moved", placement=schedule.placement, microbatches=4, slices=1, lanes=lanes, turns=schedule.turns
    )
    with pytest.raises(ScheduleError, match="does not begin a unit that stage 0 takes together"):
        check_schedule(moved, EDGES)
