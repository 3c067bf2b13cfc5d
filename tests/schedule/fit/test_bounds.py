"""Lower bounds against all schedules of tiny cases, against what an exact solver proved, and against every family."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import fit_brute
from tests.support.exact_bubbles import FOUND, PLACEMENTS

from pipefit.cost.types import ActionTable
from pipefit.errors import ScheduleError
from pipefit.schedule import FAMILIES, ScheduleProblem, linear_placement, uniform_costs, vee_placement
from pipefit.schedule.fit.bounds import lower_bound
from pipefit.schedule.fit.instance import FitInstance
from pipefit.simulate import simulate_schedule


def unit_time(placement: tuple[int, ...], microbatches: int, units: float, objective: str = "span") -> FitInstance:
    lanes = max(placement) + 1
    problem = ScheduleProblem(
        placement=placement,
        microbatches=microbatches,
        costs=uniform_costs(placement),
        limit_bytes=(units,) * lanes,
    )
    return FitInstance.from_problem(problem, objective)


def uneven(
    placement: tuple[int, ...],
    microbatches: int,
    slices: int,
    seed: int,
    limit: float,
    objective: str,
    kinds: str,
    between: float = 0.0,
) -> ScheduleProblem | FitInstance:
    """Random whole times for every stage and unit, random transfers; `between` is what I adds to memory."""
    random = np.random.default_rng(seed)
    stages = len(placement)
    shape = (stages, microbatches, slices)
    plain = uniform_costs(placement)
    held = {"F": 1.0, "I": between, "W": -1.0 - between, "B": -1.0}
    actions = {
        kind: ActionTable(
            time_s=random.integers(1, 6, shape).astype(float),
            held_bytes=np.full((1, 1, 1), held[kind]),
            peak_bytes=random.integers(0, 2, (stages, 1, 1)) * 0.5,
        )
        for kind in kinds
    }
    edges = tuple(
        replace(edge, forward_s=np.full((1, 1), float(t)), backward_s=np.full((1, 1), float(u)))
        for edge, t, u in zip(plain.edges, *random.integers(0, 3, (2, len(plain.edges))), strict=True)
    )
    costs = replace(plain, actions=actions, edges=edges)
    limits = (limit,) * (max(placement) + 1)
    problem = ScheduleProblem(
        placement=placement, microbatches=microbatches, slices=slices, costs=costs, limit_bytes=limits
    )
    return FitInstance.from_problem(problem, objective)


@settings(max_examples=30, deadline=None)
@given(
    case=st.sampled_from([((0, 1), 3, 1, "FIW"), ((0, 1), 2, 1, "FIWB"), ((0, 1), 1, 2, "FIWB"), ((0, 1), 3, 1, "FB"),
                          ((0, 1, 2), 2, 1, "FIW"), ((0, 0), 2, 1, "FIW"), ((0, 1, 1, 0), 1, 1, "FIW")]),
    seed=st.integers(0, 10_000),
    limit=st.sampled_from([1.5, 2.0, 2.5, 3.0, 4.0]),
    objective=st.sampled_from(["makespan", "span"]),
    between=st.sampled_from([-0.5, 0.0, 0.5]),
)  # fmt: skip
def test_no_schedule_of_all_is_below_the_bound(case, seed, limit, objective, between) -> None:
    placement, microbatches, slices, kinds = case
    instance = uneven(placement, microbatches, slices, seed, limit, objective, kinds, between)
    least = fit_brute.best(instance)
    assert lower_bound(instance).time_s <= least + 1e-9


def test_the_bound_is_the_proven_optimum_in_unit_time() -> None:
    """All 178 optima of `optimum.json`, V and chain, few microbatches and many."""
    for name, lanes, microbatches, units, bubble in json.loads(FOUND.read_text())["proven"]:
        instance = unit_time(PLACEMENTS[name](lanes), microbatches, units)
        bound = lower_bound(instance)
        assert bound.time_s - bound.work_s == pytest.approx(bubble), (name, lanes, microbatches, units)


@pytest.mark.parametrize("d", [2, 3, 4, 5, 8, 16])
def test_closed_forms(d: int) -> None:
    """6 d - 3 k - 1 on a V (arXiv 2405.15362, appendix); the chain before the first way back on lane 0 of a plain
    pipeline (arXiv 2401.10241, appendix B), with a time for transfers."""
    for units in (2 * ((d + 4) // 3), 2 * ((d + 2) // 2), 2 * d):
        bubble = max(0, 6 * d - 3 * units - 1)
        assert lower_bound(unit_time(vee_placement(d), 2 * d, units)).time_s - 12 * d == pytest.approx(bubble), units
        assert lower_bound(unit_time(vee_placement(d), 2 * d, units, "makespan")).time_s - 12 * d >= bubble - 1e-9, (
            units
        )
    f, i, w, c = 7.0, 9.0, 4.0, 0.5
    costs = uniform_costs(linear_placement(d), forward_s=f, input_s=i, weight_s=w, transfer_s=c)
    for k in {1, d // 2, d, 2 * d - 1}:
        problem = ScheduleProblem(
            placement=linear_placement(d), microbatches=4 * d, costs=costs, limit_bytes=(float(k),) * d
        )
        bound = lower_bound(FitInstance.from_problem(problem, "span"))
        assert bound.time_s >= 4 * d * (f + i + w) + (d - 1) * (i + 2 * c) + (d - k) * f - 1e-9


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(FAMILIES)), d=st.integers(1, 5), seed=st.integers(0, 10_000), over=st.integers(0, 3))
def test_no_family_is_below_the_bound(name: str, d: int, seed: int, over: int) -> None:
    """Every family under uneven times, at the limit that it needs itself, simulated."""
    family = FAMILIES[name]
    placement = family.placement(d)
    microbatches = family.least_units(d) + over
    plain = uneven(placement, microbatches, 1, seed, np.inf, "span", "FIWB")
    assert isinstance(plain, FitInstance)
    costs = costs_of(placement, microbatches, seed)
    try:
        schedule = family(ScheduleProblem(placement=placement, microbatches=microbatches, costs=costs))
    except ScheduleError:
        return
    timeline = simulate_schedule(schedule, costs)
    problem = ScheduleProblem(
        placement=placement, microbatches=microbatches, costs=costs, limit_bytes=tuple(timeline.peak_bytes.tolist())
    )
    spans = [stops[-1] - starts[0] for stops, starts in zip(timeline.stops_s, timeline.starts_s, strict=True)]
    assert lower_bound(FitInstance.from_problem(problem, "makespan")).time_s <= timeline.makespan_s * (1 + 1e-9)
    assert lower_bound(FitInstance.from_problem(problem, "span")).time_s <= max(spans) * (1 + 1e-9)


def costs_of(placement: tuple[int, ...], microbatches: int, seed: int):
    random = np.random.default_rng(seed)
    plain = uniform_costs(placement, transfer_s=0.3)
    actions = {
        kind: replace(table, time_s=random.lognormal(0.0, 0.4, (len(placement), microbatches, 1)))
        for kind, table in plain.actions.items()
    }
    return replace(plain, actions=actions)


def test_without_a_limit_the_bound_is_work_and_ways() -> None:
    """One microbatch on four stages: the chain there and back, and a W; many: the work of the busiest lane at least."""
    costs = uniform_costs(linear_placement(4), forward_s=2.0, input_s=3.0, weight_s=1.0, transfer_s=0.5)
    alone = FitInstance.from_problem(
        ScheduleProblem(placement=linear_placement(4), microbatches=1, costs=costs), "makespan"
    )
    assert lower_bound(alone).time_s == pytest.approx(4 * 2 + 3 * 0.5 + 4 * 3 + 3 * 0.5 + 1)
    many = FitInstance.from_problem(
        ScheduleProblem(placement=linear_placement(4), microbatches=32, costs=costs), "span"
    )
    assert lower_bound(many).time_s == pytest.approx(32 * 6)


def test_less_memory_never_lowers_the_bound() -> None:
    found = [lower_bound(unit_time(vee_placement(6), 18, units)).time_s for units in range(16, 2, -1)]
    assert found == sorted(found)
    assert found[-1] > 1.5 * found[0], "a lane that can hold three units waits most of the time"
