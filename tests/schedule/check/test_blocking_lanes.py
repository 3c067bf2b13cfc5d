"""What the checker says of an order, against real processes: messages above and below the eager size, blocking sends.

A naive order that the checker calls a deadlock hangs, where the checker says, once messages are larger than what a
channel buffers (as on NCCL), and runs while they are small; ours runs with both. An order that mixes two tensors of one
directed pair up hands the wrong one over, and the checker names it.
"""

from __future__ import annotations

import pytest
from tests.schedule.check.test_deadlock import CROSSING, LATE_RECEIVES, V_TURNED_ROUND
from tests.support.blocking_lanes import EAGER, LARGE, deferred, run_lanes

from pipefit.schedule import FAMILIES, Schedule, ScheduleProblem, check_schedule, find_deadlock, lower_schedule
from pipefit.schedule.actions import COMPUTE

NAIVE = {"crossing": CROSSING, "late": LATE_RECEIVES, "v": V_TURNED_ROUND}
PATIENCE_S = 3.0


def computed(schedule: Schedule) -> Schedule:
    lanes = tuple(tuple(action for action in lane if action.kind in COMPUTE) for lane in schedule.lanes)
    return Schedule(
        name="c", placement=schedule.placement, microbatches=schedule.microbatches, slices=schedule.slices, lanes=lanes
    )


@pytest.mark.parametrize("name", NAIVE)
def test_a_naive_order_hangs_with_large_messages_where_the_checker_says(name: str) -> None:
    naive = NAIVE[name]
    error = find_deadlock(naive)
    assert error is not None and find_deadlock(naive, rendezvous=False) is None
    outcome, places = run_lanes(naive, LARGE, PATIENCE_S)
    assert outcome == "stuck"
    for lane, actions in enumerate(naive.lanes):
        if places[lane] < len(actions):
            assert (
                f">{actions[places[lane]]}<" in error.full_text() or f"[{actions[places[lane]]}]" in error.full_text()
            )
    assert run_lanes(naive, EAGER, 30.0)[0] == "done", "with buffered sends it runs"
    assert run_lanes(lower_schedule(computed(naive)), LARGE, 30.0)[0] == "done", "our lowering of the same work runs"


@pytest.mark.parametrize("family", ["1f1b", "interleaved-1f1b", "v-min", "v-half", "zb-v"])
def test_our_orders_run_with_large_messages(family: str) -> None:
    made = FAMILIES[family]
    schedule = lower_schedule(made(ScheduleProblem(placement=made.placement(3), microbatches=6)))
    assert find_deadlock(schedule) is None
    assert run_lanes(schedule, LARGE, 30.0)[0] == "done"


@pytest.mark.parametrize("family", ["v-half", "v-min", "zb-v", "dualpipe-v"])
def test_deferred_receives_meet_the_wrong_tensor_under_a_v(family: str) -> None:
    """Found by the checker, and by a real channel without tags; with loops in place of a V the same change is sound."""
    made = FAMILIES[family]
    mixed_up = deferred(lower_schedule(made(ScheduleProblem(placement=made.placement(3), microbatches=8))))
    check_schedule(mixed_up)
    error = find_deadlock(mixed_up, rendezvous=False)
    assert error is not None and "disagree at message" in error.full_text()
    outcome, _ = run_lanes(mixed_up, EAGER, PATIENCE_S)
    assert " arrived for " in outcome
    loop = FAMILIES["1f1b"]
    assert (
        find_deadlock(
            deferred(lower_schedule(loop(ScheduleProblem(placement=(0, 1, 2), microbatches=8)))), rendezvous=False
        )
        is None
    )
