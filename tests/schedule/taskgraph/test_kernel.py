"""Plain Python and numba give the same bits, and what cannot run is an error."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from tests.support.random_schedules import cases, random_costs

from pipefit.errors import ScheduleError
from pipefit.schedule import (
    FAMILIES,
    Schedule,
    ScheduleProblem,
    linear_placement,
    lower_schedule,
    parse_lanes,
    uniform_costs,
)
from pipefit.schedule.taskgraph.compile import compile_graph, task_graph
from pipefit.schedule.taskgraph.kernel import COMPILED_ENTRIES, choose_loop, sweep_tasks
from pipefit.schedule.taskgraph.times import run_graph
from pipefit.simulate import simulate_schedule


@settings(max_examples=150, deadline=None)
@given(cases())
def test_both_ways_give_the_same_bits(case) -> None:
    schedule, edges, costs = case
    for one, dag in ((schedule, edges), (lower_schedule(schedule, edges, costs), None)):
        plain, fast = compile_graph(one, dag, compiled=False), compile_graph(one, dag, compiled=True)
        for name in ("kind", "row", "task", "pointer", "after", "consumer", "before"):
            assert np.array_equal(getattr(plain, name), getattr(fast, name)), name
        assert run_graph(plain, costs, False).moment_s.tobytes() == run_graph(fast, costs, True).moment_s.tobytes()


def test_same_bits_on_a_large_one() -> None:
    schedule = lower_schedule(FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(32), microbatches=128)))
    edges = tuple((i, i + 1, "") for i in range(31))
    graph = task_graph(schedule)
    costs = random_costs(random.Random(7), schedule, edges, whole=False)
    assert run_graph(graph, costs, False).start_s.tobytes() == run_graph(graph, costs, True).start_s.tobytes()


def test_small_graphs_do_not_wait_for_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "numba", raising=False)
    assert choose_loop(sweep_tasks, COMPILED_ENTRIES - 1) is sweep_tasks
    assert "numba" not in sys.modules
    monkeypatch.setitem(sys.modules, "numba", object())
    assert choose_loop(sweep_tasks, 100) is sweep_tasks


def test_predecessors_come_first() -> None:
    graph = compile_graph(
        lower_schedule(FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(4), microbatches=6, slices=2)))
    )
    target = np.repeat(np.arange(graph.size), np.diff(graph.pointer))
    assert (graph.after // 2 < target).all()


def test_the_same_object_is_compiled_once() -> None:
    schedule = FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(3), microbatches=3))
    assert task_graph(schedule) is task_graph(schedule)
    other = FAMILIES["gpipe"](ScheduleProblem(placement=linear_placement(3), microbatches=3))
    assert task_graph(other).schedule is other


def test_simulating_twice_gives_the_same() -> None:
    schedule = FAMILIES["1f1b"](ScheduleProblem(placement=linear_placement(5), microbatches=9))
    costs = random_costs(random.Random(3), schedule, tuple((i, i + 1, "") for i in range(4)), whole=False)
    first, second = simulate_schedule(schedule, costs), simulate_schedule(schedule, costs)
    assert first.times.start_s.tobytes() == second.times.start_s.tobytes()
    assert first.critical_path == second.critical_path


@pytest.mark.parametrize("compiled", [False, True])
def test_a_circle_is_an_error(compiled: bool) -> None:
    lanes = parse_lanes(("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    schedule = Schedule(name="x", placement=(0, 1), microbatches=2, slices=1, lanes=lanes)
    with pytest.raises(ScheduleError, match="wait for each other in a circle"):
        simulate_schedule(schedule, uniform_costs((0, 1)), compiled=compiled)


def test_a_send_without_its_receive_is_an_error() -> None:
    lanes = parse_lanes(("0F0 0SEND_F0 0B0", "1F0 1B0"))
    schedule = Schedule(name="x", placement=(0, 1), microbatches=1, slices=1, lanes=lanes)
    with pytest.raises(ScheduleError, match="SEND has no RECV"):
        simulate_schedule(schedule, uniform_costs((0, 1)))


def test_a_kind_without_cost_is_named() -> None:
    costs = uniform_costs((0,))
    del costs.actions["B"]
    schedule = FAMILIES["gpipe"](ScheduleProblem(placement=(0,), microbatches=1))
    with pytest.raises(ScheduleError, match=r"(?s)no times for an action.*seen: B"):
        simulate_schedule(schedule, costs)
