"""The dispatcher as a state machine: order, credits, retries, hedging, time limits; no process and no clock."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.data.preparation.dispatch import DispatchLimits, KillWorker, StartTask, TaskDispatcher
from pipefit.data.preparation.executor import TaskFailed, TaskFinished, WorkerDied, WorkerReady, WorkerStarting
from pipefit.errors import DataError


def machine(workers: int, **limits: float) -> TaskDispatcher:
    made = TaskDispatcher(DispatchLimits(**limits), workers)  # type: ignore[arg-type]
    for worker in range(workers):
        made.handle_event(WorkerReady(worker), 0.0)
    return made


def started(dispatcher: TaskDispatcher, now_s: float = 0.0) -> dict[int, int]:
    """Key -> worker of what is to be started."""
    return {i.key: i.worker for i in dispatcher.next_instructions(now_s) if isinstance(i, StartTask)}  # type: ignore[misc]


def test_tasks_start_in_order_as_far_as_workers_and_credits_go() -> None:
    dispatcher = machine(4, credit_bytes=100)
    for key, size in enumerate((60, 30, 20, 5)):
        dispatcher.add_task(key, None, size)
    first = started(dispatcher)
    assert list(first) == [0, 1], "20 more would be 110, and 5 stands behind it"
    dispatcher.handle_event(TaskFinished(first[1], 1, "b"), 1.0)
    assert not started(dispatcher), "what is done keeps its credits until it is taken"
    dispatcher.handle_event(TaskFinished(first[0], 0, "a"), 1.0)
    assert dispatcher.take_result(0) == "a"
    assert list(started(dispatcher)) == [2, 3] and dispatcher.used_bytes == 55


def test_a_task_beyond_all_credits_goes_alone() -> None:
    dispatcher = machine(2, credit_bytes=10)
    dispatcher.add_task("huge", None, 1000)
    dispatcher.add_task("small", None, 1)
    assert list(started(dispatcher)) == ["huge"]


def test_what_a_dead_worker_did_is_done_again_first_and_given_up_in_the_end() -> None:
    dispatcher = machine(1, attempts=3)
    dispatcher.add_task(0, None, 1)
    dispatcher.add_task(1, None, 1)
    for attempt in range(3):
        assert started(dispatcher) == {0: attempt}
        dispatcher.handle_event(WorkerDied(attempt, "ended by signal 9"), 0.0)
        dispatcher.handle_event(WorkerReady(attempt + 1), 0.0)
    assert started(dispatcher) == {1: 3}, "the next one goes on"
    with pytest.raises(DataError, match="lost its worker every time") as error:
        dispatcher.take_result(0)
    assert error.value.seen == "3 workers, the last one: ended by signal 9"
    assert error.value.allowed == "a worker that finishes the task within 300 s"
    assert str(error.value.next_step).startswith(
        "look for a shortage of memory on the host (fewer --workers need less)"
    )
    assert dispatcher.counts.retried == 2 and dispatcher.counts.died == 3


def test_an_error_of_ours_is_final_and_any_other_is_tried_again() -> None:
    dispatcher = machine(1, attempts=2)
    dispatcher.add_task(0, None, 1)
    dispatcher.add_task(1, None, 1)
    started(dispatcher)
    dispatcher.handle_event(TaskFailed(0, 0, DataError("An image is broken.")), 0.0)
    with pytest.raises(DataError, match="An image is broken"):
        dispatcher.take_result(0)
    for _ in range(2):
        assert list(started(dispatcher)) == [1]
        dispatcher.handle_event(TaskFailed(0, 1, OSError("stale handle")), 0.0)
    with pytest.raises(DataError, match="fails every time") as error:
        dispatcher.take_result(1)
    assert error.value.where == "task 1" and error.value.seen == "OSError: stale handle"
    assert error.value.allowed == "one success in 2 attempts" and "--workers 0" in str(error.value.next_step)


@pytest.mark.parametrize(
    ("key", "where"),
    [
        (("step", 6), "step 7, the order of its samples"),
        (("feed", 6, 1, 2), "step 7, the arrays of stage 1, microbatch 2"),
        ("other", "task other"),
    ],
)
def test_errors_tell_the_step_of_a_task(key: Hashable, where: str) -> None:
    dispatcher = machine(1, attempts=1)
    dispatcher.add_task(key, None, 1)
    started(dispatcher)
    dispatcher.handle_event(WorkerDied(0, "ended by signal 9"), 0.0)
    with pytest.raises(DataError, match="lost its worker every time") as error:
        dispatcher.take_result(key)
    assert error.value.where == where


def test_a_late_task_goes_to_a_second_worker_and_the_first_answer_counts() -> None:
    dispatcher = machine(2, hedge_factor=4, hedge_after_s=0.5)
    dispatcher.add_task("quick", None, 100)
    dispatcher.add_task("slow", None, 100)
    workers = started(dispatcher, 0.0)
    dispatcher.handle_event(TaskFinished(workers["quick"], "quick", 1), 1.0)
    assert not started(dispatcher, 3.9), "not before 4 times the second that 100 bytes take"
    assert started(dispatcher, 4.1) == {"slow": workers["quick"]}
    assert not started(dispatcher, 9.0), "not a third time"
    dispatcher.handle_event(TaskFinished(workers["quick"], "slow", "second"), 9.0)
    dispatcher.handle_event(TaskFinished(workers["slow"], "slow", "first"), 9.5)
    assert dispatcher.take_result("slow") == "second" and dispatcher.used_bytes == 100  # "quick" is not taken
    assert dispatcher.counts.hedged == 1


def test_a_worker_beyond_the_limit_is_killed_even_if_nobody_waits_for_it() -> None:
    dispatcher = machine(1, timeout_s=10)
    dispatcher.add_task(0, None, 1)
    started(dispatcher, 0.0)
    assert dispatcher.next_instructions(9.0) == []
    dispatcher.forget_tasks()
    assert dispatcher.next_instructions(11.0) == [KillWorker(0)]
    assert dispatcher.next_instructions(12.0) == []
    dispatcher.handle_event(WorkerDied(0, "ended by signal 9"), 12.0)
    dispatcher.handle_event(WorkerReady(1), 12.0)
    dispatcher.add_task(0, None, 1)
    assert started(dispatcher, 12.0) == {0: 1}


def test_a_task_whose_workers_are_all_killed_for_their_time_says_so() -> None:
    dispatcher = machine(1, timeout_s=10, attempts=1)
    dispatcher.add_task(0, None, 1)
    started(dispatcher, 0.0)
    assert dispatcher.next_instructions(11.0) == [KillWorker(0)]
    dispatcher.handle_event(WorkerDied(0, "ended by signal 9"), 11.0)
    with pytest.raises(DataError) as error:
        dispatcher.take_result(0)
    assert error.value.seen == "1 workers, the last one: killed: not done after 10 s"


def test_a_worker_that_is_never_up_is_killed_and_none_ever_up_is_an_error() -> None:
    dispatcher = TaskDispatcher(DispatchLimits(attempts=2, start_timeout_s=10), 1)
    dispatcher.add_task(0, None, 1)
    for worker in range(3):
        now_s = 100.0 * worker
        assert not dispatcher.is_done(0)
        dispatcher.handle_event(WorkerStarting(worker), now_s)
        assert dispatcher.next_instructions(now_s + 9) == []
        assert dispatcher.next_instructions(now_s + 11) == [KillWorker(worker)]
        dispatcher.handle_event(WorkerDied(worker, "ended by signal 9"), now_s + 12)
    with pytest.raises(DataError, match="die before they have done anything") as error:
        dispatcher.take_result(0)
    assert error.value.seen == "killed: not ready after 10 s" and dispatcher.counts.killed == 3


def test_a_worker_that_is_up_has_no_time_limit_until_it_has_a_task() -> None:
    dispatcher = TaskDispatcher(DispatchLimits(start_timeout_s=10), 1)
    dispatcher.handle_event(WorkerStarting(0), 0.0)
    dispatcher.handle_event(WorkerReady(0), 9.0)
    assert dispatcher.next_instructions(1000.0) == []


def test_many_workers_may_die_while_they_start_or_wait_without_an_error() -> None:
    """As many at once as there are, and again: none is up then, and still the others may come."""
    dispatcher = TaskDispatcher(DispatchLimits(attempts=3, credit_bytes=10), 4)
    for worker in range(4):
        dispatcher.handle_event(WorkerDied(worker, "ended by signal 9"), 0.0)
    for worker in range(4, 8):
        dispatcher.handle_event(WorkerReady(worker), 0.0)
    dispatcher.add_task("first", None, 10)
    dispatcher.add_task("second", None, 10)
    worker = started(dispatcher)["first"]
    dispatcher.handle_event(TaskFinished(worker, "first", 1), 0.0)
    for again in range(4):  # all idle: "second" waits for the credits of "first"
        assert not started(dispatcher)
        for idle in range(4):
            dispatcher.handle_event(WorkerDied(4 + 4 * again + idle, "ended by signal 9"), 0.0)
        for idle in range(4):
            dispatcher.handle_event(WorkerReady(8 + 4 * again + idle), 0.0)
    assert dispatcher.take_result("first") == 1
    assert list(started(dispatcher)) == ["second"]


def test_workers_that_never_come_up_are_an_error_of_every_task() -> None:
    dispatcher = TaskDispatcher(DispatchLimits(attempts=2), 2)
    dispatcher.add_task(0, None, 1)
    for worker in range(5):
        assert not dispatcher.is_done(0)
        dispatcher.handle_event(WorkerDied(worker, "exit code 1"), 0.0)
    with pytest.raises(DataError, match="die before they have done anything") as error:
        dispatcher.take_result(0)
    assert error.value.where == "the 5 workers that were started last" and error.value.seen == "exit code 1"
    assert error.value.allowed == "a worker that is ready within 300 s"
    assert "python -P -m pipefit.data.preparation.worker" in str(error.value.next_step)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), workers=st.integers(1, 4), credit=st.integers(1, 60))
def test_whatever_dies_and_when_all_results_come_in_order_within_the_credits(
    seed: int, workers: int, credit: int
) -> None:
    """Workers die, fail and come late at random; a task may die twice. Results are those of the requests."""
    rng, now_s, alive = random.Random(seed), 0.0, workers
    dispatcher = machine(workers, credit_bytes=credit, hedge_after_s=1.0, attempts=99, timeout_s=30)
    sizes = [rng.randint(0, 30) for _ in range(25)]
    for key, size in enumerate(sizes):
        dispatcher.add_task(key, key * 7, size)
    doing: dict[int, int] = {}
    taken: list[int] = []
    for _ in range(3000):
        now_s += rng.random()
        for instruction in dispatcher.next_instructions(now_s):
            if isinstance(instruction, StartTask):
                assert instruction.worker not in doing and instruction.request == instruction.key * 7  # type: ignore[operator]
                doing[instruction.worker] = instruction.key  # type: ignore[assignment]
            else:
                doing.pop(instruction.worker, None)
                dispatcher.handle_event(WorkerDied(instruction.worker, "killed"), now_s)
                dispatcher.handle_event(WorkerReady(alive), now_s)
                alive += 1
        assert dispatcher.used_bytes <= max(credit, max(sizes))
        for worker in list(doing):
            luck = rng.random()
            if luck < 0.3:
                key = doing.pop(worker)
                dispatcher.handle_event(TaskFinished(worker, key, key * 7 + 1), now_s)
            elif luck < 0.4:
                dispatcher.handle_event(TaskFailed(worker, doing.pop(worker), OSError()), now_s)
            elif luck < 0.5:
                doing.pop(worker)
                dispatcher.handle_event(WorkerDied(worker, "crashed"), now_s)
                dispatcher.handle_event(WorkerReady(alive), now_s)
                alive += 1
        while len(taken) < len(sizes) and dispatcher.is_done(len(taken)):
            taken.append(dispatcher.take_result(len(taken)))
        if len(taken) == len(sizes):
            break
    assert taken == [key * 7 + 1 for key in range(len(sizes))]
