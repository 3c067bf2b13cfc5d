"""B beside I and W where memory decides: the least over all schedules is found, and no bound is above it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.support import fit_brute

from pipefit.cost.types import ActionTable, CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule import ScheduleProblem, linear_placement, uniform_costs, vee_placement
from pipefit.schedule.fit.bounds import check_bound
from pipefit.schedule.fit.exact import windows as exact
from pipefit.schedule.fit.instance import FitInstance
from pipefit.schedule.fit.kernels.arrays import PLAIN, make_tables
from pipefit.schedule.fit.search import fit_schedule
from pipefit.schedule.fit.starts.construct import merge_choices, sweep_orders
from pipefit.schedule.fit.verify import SimulationMemo, sequential_orders, sequential_peak


def costs_of(times: dict[str, list[float]], more: float, passing: float, transfer: tuple[float, float]) -> CostTable:
    """F holds 1; I holds `more` beside it and needs `passing`; W or B frees all of it."""
    stages = len(times["F"])
    held = {"F": 1.0, "I": more, "W": -1.0 - more, "B": -1.0}

    def table(kind: str) -> ActionTable:
        near = np.full((1, 1, 1), passing if kind == "I" else 0.0)
        time_s = np.array(times[kind], dtype=np.float64).reshape(-1, 1, 1)
        return ActionTable(time_s=time_s, held_bytes=np.full((1, 1, 1), held[kind]), peak_bytes=near)

    costs = uniform_costs(linear_placement(stages))
    edges = tuple(
        replace(edge, forward_s=np.full((1, 1), transfer[0]), backward_s=np.full((1, 1), transfer[1]))
        for edge in costs.edges
    )
    return replace(costs, actions={kind: table(kind) for kind in "FIWB"}, edges=edges)


def stated(more: float, passing: float, first: float) -> ScheduleProblem:
    """Lane 0 has memory for two forwards and for two B, not for an I between: it must merge, lane 1 must not."""
    times = {"F": [3.0, 1.0], "I": [4.0, 5.0], "W": [3.0, 2.0], "B": [7.0, 7.0]}
    costs = costs_of(times, more, passing, (1.0, 0.5))
    return ScheduleProblem(placement=(0, 1), microbatches=2, costs=costs, limit_bytes=(first, 9.0))


@pytest.mark.parametrize(("more", "passing"), [(0.25, 0.0), (0.0, 0.25)])
def test_what_must_merge_and_what_must_split(more: float, passing: float) -> None:
    problem = stated(more, passing, 2.0)
    least = fit_brute.best(FitInstance.from_problem(problem))
    assert least == 24.5
    found = fit_schedule(problem, moves=1000)
    assert found.time_s == least and found.bound_s <= least
    kinds = {(action.kind, lane) for lane, _, action in found.schedule}
    assert ("B", 0) in kinds and ("W", 0) not in kinds and ("W", 1) in kinds


@pytest.mark.parametrize(("more", "passing"), [(0.25, 0.0), (0.0, 0.25)])
def test_a_proof_speaks_of_merged_and_of_split_backwards(more: float, passing: float) -> None:
    """From the schedule in which everything is merged, which a proof must not take for granted."""
    pytest.importorskip("ortools", reason="needs the extra: pip install 'pipefit[exact]'")
    instance = FitInstance.from_problem(stated(more, passing, 2.0))
    merged = [np.array([instance.operation_number(*op) for op in lane], dtype=np.int32) for lane in (
        [(0, 0, 0), (0, 0, 1), (3, 0, 0), (3, 0, 1)], [(0, 1, 0), (3, 1, 0), (0, 1, 1), (3, 1, 1)],
    )]  # fmt: skip
    found = exact.improve_windows(instance, merged, 20.0)
    assert found.time_s == found.bound_s == 24.5


def drawn(seed: int) -> ScheduleProblem:
    """Two stages, on two lanes or on one, whose I takes more memory than B, or frees some."""
    rng = random.Random(seed)
    times = {kind: [float(rng.randint(1, 5)) for _ in range(2)] for kind in "FIW"}
    saved = rng.choice((0.0, 0.0, 0.5, -0.5))
    times["B"] = [i + w - saved for i, w in zip(times["I"], times["W"], strict=True)]
    costs = costs_of(times, rng.choice((0.25, 0.5, -0.25)), rng.choice((0.0, 0.25)), (rng.randint(0, 2), 0.5))
    limit = tuple(rng.choice((1.5, 2.0, 2.25, 9.0)) for _ in range(2))
    return ScheduleProblem(placement=(0, 1), microbatches=2, costs=costs, limit_bytes=limit)


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("seed", range(40))
def test_the_least_of_all_is_found(seed: int, objective: str) -> None:
    problem = drawn(seed)
    least = fit_brute.best(FitInstance.from_problem(problem, objective))
    found = fit_schedule(problem, moves=2000, objective=objective)
    assert found.bound_s <= least + 1e-9
    assert found.time_s == pytest.approx(least)


@pytest.mark.parametrize("seed", range(40))
def test_no_proof_is_above_the_least(seed: int) -> None:
    """From merged schedules and from split ones."""
    pytest.importorskip("ortools", reason="needs the extra: pip install 'pipefit[exact]'")
    problem = drawn(seed)
    instance = FitInstance.from_problem(problem)
    least = fit_brute.best(instance)
    simulated = SimulationMemo(problem, instance)
    starts = [start for start in sequential_orders(instance, PLAIN) if not simulated.excess_bytes(start).any()]
    assert starts
    for start in starts:
        found = exact.improve_windows(instance, start.orders, 10.0, seed)
        assert found.time_s == pytest.approx(least)
        assert found.bound_s == pytest.approx(least), "proven"


def test_merging_is_open_where_time_or_memory_differs() -> None:
    uniform = ScheduleProblem(
        placement=vee_placement(2), microbatches=3, costs=uniform_costs(vee_placement(2)), limit_bytes=(3.0, 3.0)
    )
    assert (
        not FitInstance.from_problem(uniform).open_stages().any()
        and len(merge_choices(FitInstance.from_problem(uniform))) == 2
    )
    assert FitInstance.from_problem(stated(0.25, 0.0, 2.0)).open_stages().tolist() == [True, True]
    boundless = replace(stated(0.25, 0.0, 2.0), limit_bytes=(2.0, np.inf))
    assert FitInstance.from_problem(boundless).open_stages().tolist() == [True, False]
    choices = [choice.tolist() for choice in merge_choices(FitInstance.from_problem(stated(0.25, 0.0, 2.0)))]
    assert choices == [[False, False], [True, True], [True, False]]


def test_a_wrong_bound_is_an_error() -> None:
    assert check_bound(2.0, 3.0) == 2.0 and check_bound(3.0 * (1 + 1e-9), 3.0) == 3.0
    with pytest.raises(AssertionError, match=r"a bound of 3.1 s for a schedule that takes 3.0 s"):
        check_bound(3.1, 3.0)


def test_one_microbatch_after_the_other_always_runs() -> None:
    """W needs so much memory that a forward started early would block it: the orders are laid out, not built."""
    placement = (0, 1, 2, 3, 0, 1, 2, 3)
    held = {"F": 1.0, "I": 30.0, "W": -31.0, "B": -1.0}
    near = {"F": 0.0, "I": 0.0, "W": 140.0, "B": 100.0}

    def table(kind: str) -> ActionTable:
        time_s, held_bytes, peak_bytes = (np.full((1, 1, 1), figure) for figure in (1.0, held[kind], near[kind]))
        return ActionTable(time_s=time_s, held_bytes=held_bytes, peak_bytes=peak_bytes)

    costs = replace(uniform_costs(placement), actions={kind: table(kind) for kind in "FIWB"})
    problem = ScheduleProblem(placement=placement, microbatches=4, costs=costs, limit_bytes=(1.0,) * 4)
    instance = FitInstance.from_problem(problem)
    starts = sequential_orders(instance, PLAIN)
    assert len(starts) == len(merge_choices(instance)) > 1
    for start, merge in zip(starts, merge_choices(instance), strict=True):
        tables = make_tables(instance)
        state = sweep_orders(instance, tables, PLAIN, start.orders)
        for lane, order in enumerate(start.orders):
            peak = float((state.level[lane, : len(order)] + tables.need[order]).max())
            assert peak == pytest.approx(sequential_peak(instance, lane, merge))
    with pytest.raises(ScheduleError):
        fit_schedule(problem, moves=100)
