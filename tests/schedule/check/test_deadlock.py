"""Schedules that hang under rendezvous sends, wrong channel orders, and ones that are fine."""

from __future__ import annotations

import pytest

from pipefit.errors import DeadlockError
from pipefit.schedule import (
    FAMILIES,
    Schedule,
    ScheduleProblem,
    check_schedule,
    find_deadlock,
    lower_schedule,
    parse_lanes,
    vee_placement,
)
from pipefit.schedule.check.deadlock import check_deadlock


def schedule_of(*lanes: str, placement: tuple[int, ...], microbatches: int) -> Schedule:
    return Schedule(name="case", placement=placement, microbatches=microbatches, slices=1, lanes=parse_lanes(lanes))


CROSSING = schedule_of(
    # 1F1B where both neighbours finish together and both send before they post: the classic.
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    placement=(0, 1),
    microbatches=2,
)
LATE_RECEIVES = schedule_of(
    # GPipe whose middle lane posts its receives of gradients only where it uses them, behind its own sends.
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
    "1RECV_F0 1F0 1RECV_F1 1F1 1SEND_F0 1SEND_F1 1RECV_B0 1B0 1RECV_B1 1B1 1SEND_B0 1SEND_B1",
    "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1",
    placement=(0, 1, 2),
    microbatches=2,
)
THREE_IN_A_RING = schedule_of(
    # A looped placement: every lane sends to the next before it posts what comes from the one before.
    "0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3SEND_F0 3RECV_F1 3F1 3SEND_F1 3RECV_B0 3RECV_B1 3B0 3SEND_B0 3B1 3SEND_B1"
    " 0RECV_B0 0RECV_B1 0B0 0B1",
    "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 4RECV_F0 4F0 4SEND_F0 4RECV_F1 4F1 4SEND_F1 4RECV_B0 4RECV_B1 4B0"
    " 4SEND_B0 4B1 4SEND_B1 1RECV_B0 1RECV_B1 1B0 1SEND_B0 1B1 1SEND_B1",
    "2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 5RECV_F0 5F0 5RECV_F1 5F1 5B0 5SEND_B0 5B1 5SEND_B1 2RECV_B0"
    " 2RECV_B1 2B0 2SEND_B0 2B1 2SEND_B1",
    placement=(0, 1, 2, 0, 1, 2),
    microbatches=2,
)
V_TURNED_ROUND = schedule_of(
    # A V: lane 0 sends forward to lane 1, which at that moment sends forward to lane 0 (stage 2 to stage 3).
    "0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2F1 2SEND_F1 2RECV_B0 2B0 1B0 1SEND_B0 2RECV_B1 2B1 1B1 1SEND_B1",
    placement=(0, 1, 1, 0),
    microbatches=2,
)


@pytest.mark.parametrize("schedule", [CROSSING, LATE_RECEIVES, V_TURNED_ROUND], ids=["crossing", "late", "v"])
def test_it_hangs_under_rendezvous_and_not_with_buffers(schedule: Schedule) -> None:
    check_schedule(schedule)
    error = find_deadlock(schedule)
    assert error is not None and find_deadlock(schedule, rendezvous=False) is None
    text = error.full_text()
    assert "a SEND blocks until its RECV is posted" in text
    assert "With buffered sends (gloo with small messages) it would run" in text
    assert "circle: lane" in text and "^^^" in text and "waits for" in text
    with pytest.raises(DeadlockError):
        check_deadlock(schedule)


def test_the_drawing_shows_every_blocked_lane() -> None:
    error = find_deadlock(CROSSING)
    assert error is not None
    assert error.full_text().splitlines()[:6] == [
        "The lanes hang: each waits for another (a SEND blocks until its RECV is posted).",
        "  circle: lane 0 -> lane 1 -> lane 0",
        "  With buffered sends (gloo with small messages) it would run; with rendezvous (NCCL) it hangs.",
        "  lane 0  0F0      0SEND_F0 0F1 >0SEND_F1< 0RECV_B0 0B0 0RECV_B1 0B1   waits for 1RECV_F1 of lane 1",
        "                                ^^^^^^^^^^",
        "  lane 1  1RECV_F0 1F0      1B0 [1SEND_B0] 1RECV_F1 1F1 1B1      1SEND_B1   waits for 0RECV_B0 of lane 0",
    ]


def test_a_ring_that_drains_at_one_lane_is_fine() -> None:
    """The last stage's lane only receives, so the ring of sends always drains: not every suspicious order hangs."""
    check_schedule(THREE_IN_A_RING)
    assert find_deadlock(THREE_IN_A_RING) is None


def test_the_lowering_of_the_same_computed_schedules_is_fine() -> None:
    for schedule in (CROSSING, LATE_RECEIVES, THREE_IN_A_RING, V_TURNED_ROUND):
        lanes = tuple(tuple(action for action in lane if action.kind in "FIWB") for lane in schedule.lanes)
        computed = Schedule(
            name="c", placement=schedule.placement, microbatches=schedule.microbatches, slices=1, lanes=lanes
        )
        assert find_deadlock(lower_schedule(computed)) is None


def test_a_true_dependency_circle_hangs_with_buffers_too() -> None:
    schedule = schedule_of(
        "0RECV_B0 0F1 0SEND_F1 0F0 0SEND_F0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1F1 1RECV_F0 1B1 1SEND_B1 1F0 1B0 1SEND_B0",
        placement=(0, 1),
        microbatches=2,
    )
    # The gradients arrive as 1, 0 but are received as 0, 1.
    error = find_deadlock(schedule, rendezvous=False)
    assert error is not None and "disagree at message 0" in error.full_text()
    stuck = schedule_of(
        "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0B0 0F1 0SEND_F1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        placement=(0, 1),
        microbatches=2,
    )
    error = find_deadlock(stuck)
    assert error is not None and "With buffered sends" not in error.full_text()
    assert "waits for 1SEND_B0 of lane 1" in error.full_text() and "waits for 0SEND_F1 of lane 0" in error.full_text()
    assert find_deadlock(stuck, rendezvous=False) is not None


def test_a_v_placement_with_deferred_receives_meets_the_wrong_tensor() -> None:
    """Between two neighbours of a V, forward and backward tensors go the same way; deferring a receive swaps them
    (which gives wrong gradients without a word on gloo under PyTorch's `defer_pp_recv`)."""
    computed = FAMILIES["gpipe"](ScheduleProblem(placement=vee_placement(2), microbatches=2))
    lowered = lower_schedule(computed)
    assert find_deadlock(lowered) is None
    swapped = schedule_of(
        "0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3RECV_F1 3B0 3SEND_B0 3F1 3B1 3SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2RECV_B0 2B0 1B0 1SEND_B0 2F1 2SEND_F1 2RECV_B1 2B1 1B1 1SEND_B1",
        placement=(0, 1, 1, 0),
        microbatches=2,
    )
    check_schedule(swapped)
    error = find_deadlock(swapped)
    assert error is not None
    text = error.full_text()
    assert "The two ends of the channel from lane 1 to lane 0 disagree at message 1." in text
    assert "lane 1 sends:    2SEND_F0 >1SEND_B0< 2SEND_F1 1SEND_B1" in text
    assert "lane 0 receives: 3RECV_F0 >3RECV_F1< 0RECV_B0 0RECV_B1" in text
    assert "one first-in first-out order per directed pair" in text


def test_a_receive_without_a_send_is_a_mismatch() -> None:
    schedule = schedule_of("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", placement=(0, 1), microbatches=1)
    error = find_deadlock(schedule)
    assert error is not None and ">nothing<" in error.full_text() and "disagree at message 0" in error.full_text()


def test_collectives_must_come_in_one_order() -> None:
    tail = ("0REDUCE:a 0REDUCE:b NORM STEP", "1REDUCE:b 1REDUCE:a NORM STEP")
    head = ("0F0 0SEND_F0 0RECV_B0 0B0 ", "1RECV_F0 1F0 1B0 1SEND_B0 ")
    schedule = schedule_of(head[0] + tail[0], head[1] + tail[1], placement=(0, 1), microbatches=1)
    error = find_deadlock(schedule)
    assert error is not None
    assert "waits for lane 1 to reach REDUCE:a" in error.full_text()
    assert "waits for lane 0 to reach REDUCE:b" in error.full_text()
    good = schedule_of(head[0] + tail[0], head[1] + tail[0].replace("0R", "1R"), placement=(0, 1), microbatches=1)
    assert find_deadlock(good) is None


def test_a_shared_reduce_in_the_middle_can_hang() -> None:
    """The last lane waits in the reduction of tied parameters while the first still needs its gradient."""
    schedule = schedule_of(
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE:tied NORM STEP",
        "1RECV_F0 1F0 1B0 1REDUCE:tied 1SEND_B0 NORM STEP",
        placement=(0, 1),
        microbatches=1,
    )
    error = find_deadlock(schedule)
    assert error is not None and "waits for 1SEND_B0 of lane 1" in error.full_text()


def test_two_tied_stages_on_one_lane_do_not_wait_for_themselves() -> None:
    computed = FAMILIES["gpipe"](ScheduleProblem(placement=vee_placement(2), microbatches=2))
    lowered = lower_schedule(computed, tied={"embedding": (0, 3)})
    check_schedule(lowered)
    assert find_deadlock(lowered) is None
