"""The exact solver's improvements and proofs against all schedules of tiny cases, proven optima and the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.schedule.fit.test_bounds import uneven, unit_time
from tests.support import fit_brute
from tests.support.exact_bubbles import PLACEMENTS, least_bubble

from pipefit.errors import ScheduleError
from pipefit.schedule import FAMILIES, ScheduleProblem, check_schedule, linear_placement, uniform_costs, vee_placement
from pipefit.schedule.fit.exact import windows as exact
from pipefit.schedule.fit.exact.scale import (
    ScaledInstance,
    common_quantum,
    nodes_of,
    objective_of,
    orders_from,
    state_of,
)
from pipefit.schedule.fit.instance import FitInstance, orders_of, schedule_of
from pipefit.schedule.fit.search import fit_schedule
from pipefit.schedule.lowering.lower import lower_schedule
from pipefit.simulate import simulate_schedule


def one_by_one(instance: FitInstance) -> list[np.ndarray]:
    """The orders of a schedule that runs one unit after the other, as slowly and with as little memory as can be."""
    orders = []
    for lane in range(instance.lanes):
        row = []
        for microbatch in range(instance.microbatches):
            units = range(microbatch * instance.slices, (microbatch + 1) * instance.slices)
            row += [instance.operation_number(0, stage, unit) for stage in instance.lane_stages(lane) for unit in units]
            for stage in reversed(instance.lane_stages(lane)):
                for unit in reversed(units):
                    kinds = (1, 2) if instance.may_split[stage] else (3,)
                    row += [instance.operation_number(kind, stage, unit) for kind in kinds]
        orders.append(np.array(row, dtype=np.int32))
    return orders


CASES = [
    ((0, 1), 3, 1, "FIW"), ((0, 1), 2, 1, "FIWB"), ((0, 1), 1, 2, "FIWB"), ((0, 1), 3, 1, "FB"),
    ((0, 0), 2, 1, "FIW"), ((0, 1, 1, 0), 1, 1, "FIW"), ((0, 1, 2), 2, 1, "FIW"),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("case", CASES)
def test_tiny_cases_are_solved_to_the_least_of_all(case, objective: str, seed: int) -> None:
    """Uneven times by stage and unit, memory that passes and that I adds or frees, merged backwards that pay or not."""
    pytest.importorskip("ortools", reason="needs the extra: pip install 'pipefit[exact]'")
    placement, microbatches, slices, kinds = case
    between, limit = (-0.5, 0.0, 0.5)[seed], (2.5, 3.0, 4.0)[seed]
    instance = uneven(placement, microbatches, slices, seed, limit, objective, kinds, between)
    found = exact.improve_windows(instance, one_by_one(instance), 20.0, seed)
    least = fit_brute.best(instance)
    assert found.time_s == pytest.approx(least)
    assert found.bound_s <= least + 1e-9
    if objective == "makespan":
        assert found.bound_s == pytest.approx(least), "proven"


@pytest.mark.parametrize(
    ("name", "d", "m", "units"), [("vee", 2, 4, 3), ("vee", 2, 4, 4), ("vee", 3, 5, 4), ("linear", 4, 6, 4)]
)
def test_unit_time_is_solved_to_the_proven_optimum(name: str, d: int, m: int, units: int) -> None:
    """Against the other model of the tests, from the worst schedule there is."""
    pytest.importorskip("ortools", reason="needs the extra: pip install 'pipefit[exact]'")
    instance = unit_time(PLACEMENTS[name](d), m, units)
    found = exact.improve_windows(instance, one_by_one(instance), 30.0, 0)
    bubble = least_bubble(PLACEMENTS[name](d), m, units, seconds=30)
    assert found.time_s - float(instance.work_s().max()) == pytest.approx(bubble)
    assert found.bound_s == pytest.approx(found.time_s)


def windowed(port_s: float, limit: float) -> ScheduleProblem:
    """A V on four lanes, the last stage 1.5 times as long."""
    placement = vee_placement(4)
    costs = uniform_costs(placement, forward_s=2.8, input_s=2.8, weight_s=2.0, transfer_s=0.4, port_s=port_s)
    factor = np.ones((8, 1, 1))
    factor[-1] = 1.5
    actions = {kind: replace(table, time_s=table.time_s * factor) for kind, table in costs.actions.items()}
    costs = replace(costs, actions=actions)
    return ScheduleProblem(placement=placement, microbatches=8, costs=costs, limit_bytes=(limit,) * 4)


@pytest.mark.parametrize("port_s", [0.0, 0.3])
def test_windows_shorten_a_family_and_stay_within_its_memory(port_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """V-Half under uneven times gets shorter in a few small windows, and the simulator agrees; with ports, too."""
    pytest.importorskip("ortools", reason="needs the extra: pip install 'pipefit[exact]'")
    for name, value in {"SMALL": 0, "FIRST_SIZE": 60.0, "EFFORT": 0.2, "POLISH": 0}.items():
        monkeypatch.setattr(exact, name, value)
    problem = windowed(port_s, 6.0)
    instance = FitInstance.from_problem(problem, "makespan")
    start = orders_of(instance, FAMILIES["v-half"](problem))
    before = exact.improve_windows(instance, start, 0.0)
    found = exact.improve_windows(instance, start, 10.0, 1)
    schedule = schedule_of(instance, found.orders)
    check_schedule(schedule)
    lowered = lower_schedule(schedule, problem.stage_edges, problem.costs, reductions=(), optimizer=False)
    timeline = simulate_schedule(lowered, problem.costs)
    assert max(timeline.peak_bytes) <= 6.0 + 1e-9
    assert timeline.makespan_s == pytest.approx(found.time_s)
    assert (
        before.time_s == pytest.approx(simulate_schedule(FAMILIES["v-half"](problem), problem.costs).makespan_s)
        or port_s
    )
    assert found.bound_s <= found.time_s < before.time_s * 0.97
    assert before.windows == 0 < found.windows


def test_nothing_is_lost_between_orders_and_nodes() -> None:
    """Orders to nodes and back, and the earliest times of nodes against the simulator, for every family with a W."""
    for name, family in FAMILIES.items():
        if name == "fit":
            continue
        placement = family.placement(3)
        costs = uniform_costs(placement, forward_s=3.0, input_s=4.0, weight_s=2.0, transfer_s=1.0)
        problem = ScheduleProblem(placement=placement, microbatches=6, costs=costs)
        schedule = family(problem)
        instance = FitInstance.from_problem(problem, "makespan")
        scaled = ScaledInstance.from_instance(instance)
        lanes, merged = nodes_of(scaled, orders_of(instance, schedule))
        state = state_of(scaled, lanes, merged)
        assert state is not None
        assert schedule_of(instance, orders_from(scaled, lanes, merged)).lanes == schedule.lanes
        assert objective_of(scaled, state) * scaled.quantum_s == pytest.approx(
            simulate_schedule(schedule, costs).makespan_s
        )


def test_times_are_whole_quanta_or_rounded_down() -> None:
    assert common_quantum(np.array([28.0, 42.0, 20.0, 4.0, 0.0]), 0.01) == (2.0, True)
    assert common_quantum(np.array([0.28, 0.42]), 1e-4) == (pytest.approx(0.14), True)
    assert common_quantum(np.array([1.0, np.pi]), 1e-3) == (1e-3, False)
    instance = FitInstance.from_problem(
        ScheduleProblem(
            placement=linear_placement(2), microbatches=3, costs=uniform_costs(linear_placement(2), forward_s=np.pi)
        ),
        "makespan",
    )
    down = ScaledInstance.from_instance(instance, down=True)
    assert not down.exact and (down.time * down.quantum_s <= instance.time_s + 1e-9).all()
    assert (down.time * down.quantum_s >= instance.time_s - down.quantum_s).all()


def test_fit_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipefit.schedule.fit.exact.windows.is_installed", lambda name: name != "ortools")
    instance = unit_time(linear_placement(2), 2, 2)
    with pytest.raises(ScheduleError) as error:
        exact.improve_windows(instance, one_by_one(instance), 1.0)
    assert "exact solver is not installed" in str(error.value) and "pip install 'pipefit[exact]'" in str(error.value)


def test_a_fitted_schedule_is_proven_optimal() -> None:
    """d = 4, m = 8, 28/28/20, transfer 4, the last stage 1.5 times as long, 1F1B's memory: the bound is reached."""
    problem = windowed(0.0, 8.0)
    instance = FitInstance.from_problem(problem, "span")
    found = fit_schedule(problem, objective="span", moves=40_000)
    assert found.bound_s <= found.time_s <= found.bound_s * 1.001
    assert float(instance.work_s().max()) < found.bound_s
