"""The inner loops of fitting: their times are the simulator's, their moves legal, and numba changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.random_schedules import random_costs, random_schedule

from pipefit.cost.types import CostTable
from pipefit.schedule import (
    Edge,
    ScheduleProblem,
    chain_edges,
    check_schedule,
    find_family,
    linear_placement,
    uniform_costs,
    vee_placement,
)
from pipefit.schedule.fit.instance import FitInstance, orders_of, schedule_of
from pipefit.schedule.fit.kernels.arrays import PLAIN, compile_loops, make_state, make_tables, make_trial
from pipefit.schedule.fit.kernels.moves import (
    shift_critical,
    shift_one,
    shift_run,
    shift_wave,
    toggle_merge,
    trace_path,
)
from pipefit.schedule.fit.kernels.sweep import evaluate_trial
from pipefit.schedule.fit.starts.construct import all_starts, fits_in_memory
from pipefit.simulate import simulate_schedule

DAG: tuple[Edge, ...] = ((0, 1, ""), (1, 3, ""), (0, 2, "skip"), (2, 3, ""), (3, 4, ""), (4, 5, ""), (1, 5, "far"))
SHAPES = (
    (linear_placement(3), chain_edges(3)),
    (vee_placement(2), chain_edges(4)),
    (vee_placement(3), chain_edges(6)),
    ((0, 1, 0, 1), chain_edges(4)),
    ((0, 1, 2, 0, 1, 2), DAG),
    ((0, 0, 1, 1, 2, 2), DAG),
)


def positive(costs: CostTable) -> CostTable:
    """The same with times that are not zero."""
    actions = {kind: replace(table, time_s=table.time_s + 0.25) for kind, table in costs.actions.items()}
    return replace(costs, actions=actions)


def random_problem(rng: random.Random) -> ScheduleProblem:
    """Uneven stages with what an action leaves behind in balance."""
    placement, edges = rng.choice(SHAPES)
    stages = len(placement)
    costs = uniform_costs(placement, edges, transfer_s=rng.choice((0.0, 0.3)), port_s=rng.choice((0.0, 0.2)))
    kept = np.array([rng.uniform(0.5, 2.0) for _ in range(stages)]).reshape(-1, 1, 1)
    freed = rng.choice((0.0, 0.5))
    held = {"F": kept, "I": -freed * kept, "W": (freed - 1) * kept, "B": -kept}
    actions = {
        kind: replace(
            table,
            time_s=table.time_s * np.array([rng.lognormvariate(0, 0.3) for _ in range(stages)]).reshape(-1, 1, 1),
            held_bytes=held[kind],
            peak_bytes=np.array([rng.choice((0.0, 0.3)) for _ in range(stages)]).reshape(-1, 1, 1),
        )
        for kind, table in costs.actions.items()
    }
    limit = tuple(rng.uniform(1.5, 4.0) * float(kept.max()) * 3 for _ in range(max(placement) + 1))
    return ScheduleProblem(
        placement=placement,
        edges=edges,
        microbatches=rng.randint(2, 5),
        slices=rng.randint(1, 2),
        costs=replace(costs, actions=actions),
        limit_bytes=limit,
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), whole=st.booleans())
def test_times_are_those_of_the_simulator(seed: int, whole: bool) -> None:
    rng = random.Random(seed)
    placement, edges = rng.choice(SHAPES)
    schedule = random_schedule(rng, placement, rng.randint(1, 5), rng.randint(1, 2), edges)
    costs = positive(random_costs(rng, schedule, edges, whole))
    problem = ScheduleProblem(
        placement=placement, microbatches=schedule.microbatches, slices=schedule.slices, edges=edges, costs=costs
    )
    instance = FitInstance.from_problem(problem)
    orders = orders_of(instance, schedule)
    assert schedule_of(instance, orders, schedule.name) == schedule
    t = make_tables(instance)
    s = make_state(t, instance, orders)
    assert PLAIN.sweep(t, s)
    timeline = simulate_schedule(schedule, costs, edges)
    assert s.value[0] == timeline.compute_end_s
    for lane, order in enumerate(orders):
        assert s.start[lane, : len(order)].tolist() == timeline.starts_s[lane].tolist()
    span = make_tables(FitInstance.from_problem(problem, "span"))
    s = make_state(span, instance, orders)
    PLAIN.sweep(span, s)
    spans = [stops[-1] - starts[0] for starts, stops in zip(timeline.starts_s, timeline.stops_s, strict=True)]
    assert s.value[0] == pytest.approx(max(spans), rel=1e-12)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_moves_are_legal_and_valued_as_if_from_the_start(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    instance = FitInstance.from_problem(problem, rng.choice(("makespan", "span")))
    t = make_tables(instance)
    starts = all_starts(instance, problem, t, PLAIN)
    if not starts:
        return
    for start in starts:
        s = make_state(t, instance, start.orders)
        assert PLAIN.sweep(t, s) and s.value[0] == pytest.approx(start.time_s, rel=1e-12), start.name
        assert fits_in_memory(t, s, start.orders), start.name
    s = make_state(t, instance, starts[0].orders)
    PLAIN.sweep(t, s)
    r = make_trial(t, s, seed % 1000)
    moved = 0
    for n in range(40):
        for lane in range(instance.lanes):
            r.changed[lane] = False
        move = n % 5
        lane = rng.randrange(instance.lanes)
        if move == 0:
            since = shift_one(t, s, r, lane, 6)
        elif move == 1:
            since = shift_run(t, s, r, lane)
        elif move == 2:
            since = shift_wave(t, s, r)
        elif move == 3:
            trace_path(t, s, r)
            since = shift_critical(t, s, r, 6)
        else:
            since = toggle_merge(t, s, r, lane)
        if since < 0:
            continue
        moved += 1
        orders = [
            (r.order[k, : r.length[k]] if r.changed[k] else s.order[k, : s.length[k]]).astype(np.int32)
            for k in range(instance.lanes)
        ]
        for k, order in enumerate(orders):
            r.left[instance.lanes + k] = t.time[order].sum()
            held = np.concatenate(([0.0], np.cumsum(t.held[order])))[:-1]
            assert (held + t.need[order] <= t.limit[k] * (1 + 1e-9)).all()
        fresh = make_state(t, instance, orders)
        runs = PLAIN.sweep(t, fresh)
        assert evaluate_trial(t, s, r, 1e299, since) == runs
        if runs:
            assert r.value[0] == fresh.value[0]
            assert r.value[1] == pytest.approx(fresh.value[1], rel=1e-12)
            check_schedule(schedule_of(instance, orders), problem.stage_edges)
            best = float(fresh.value[0])
            assert not evaluate_trial(t, s, r, best * (1 - 1e-6) - 1e-6, since) or r.value[0] == best
            if n % 3 == 0:
                s = fresh
    assert moved > 3


@pytest.mark.parametrize("seed", range(8))
def test_the_critical_path_leads_from_the_start_to_the_end(seed: int) -> None:
    """Every operation on it starts when the one before it, on its lane or with its data, lets it start."""
    problem = random_problem(random.Random(seed))
    instance = FitInstance.from_problem(problem, "span" if seed % 2 else "makespan")
    t = make_tables(instance)
    starts = all_starts(instance, problem, t, PLAIN)
    if not starts:
        return
    s = make_state(t, instance, starts[0].orders)
    PLAIN.sweep(t, s)
    r = make_trial(t, s, 0)
    trace_path(t, s, r)
    path = r.path[: r.numbers[2]].tolist()
    lane, at = path[0]
    first = s.start[lane, 0] if t.span else 0.0
    assert s.start[lane, at] + t.time[s.order[lane, at]] - first == s.value[0]
    assert s.start[tuple(path[-1])] == 0.0
    for (lane, at), (other, before) in pairwise(path):
        gap = s.start[lane, at] - s.start[other, before] - t.time[s.order[other, before]]
        if lane == other and at == before + 1:
            assert gap == pytest.approx(0.0, abs=1e-9)
        elif lane == other:  # the middle of a long stretch is left out
            assert at > before + 1
        else:  # an edge, with its transfer; a busy port takes longer
            stages = [instance.operation_parts(s.order[place])[1] for place in ((lane, at), (other, before))]
            assert stages[0] == stages[1] or tuple(sorted(stages)) in {edge[:2] for edge in instance.edges}
            assert gap >= -1e-9


def test_moves_of_every_kind_are_met() -> None:
    """The move test above must try what the search does: with room in memory each kind of move changes something."""
    problem = ScheduleProblem(placement=vee_placement(3), microbatches=4, costs=uniform_costs(vee_placement(3)))
    instance = FitInstance.from_problem(problem)
    t = make_tables(instance)
    s = make_state(t, instance, orders_of(instance, find_family("v-half")(problem)))
    assert PLAIN.sweep(t, s)
    r = make_trial(t, s, 1)
    trace_path(t, s, r)
    for move in (
        lambda: shift_critical(t, s, r, 6),
        lambda: shift_one(t, s, r, 0, 6),
        lambda: shift_run(t, s, r, 0),
        lambda: shift_wave(t, s, r),
        lambda: toggle_merge(t, s, r, 0),
    ):
        changed = 0
        for _ in range(40):
            r.changed[:] = False
            changed += move() >= 0
        assert changed > 5


@pytest.mark.parametrize("seed", range(6))
def test_numba_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    instance = FitInstance.from_problem(problem, rng.choice(("makespan", "span")))
    t = make_tables(instance)
    found = []
    for loops in (PLAIN, compile_loops()):
        starts = all_starts(instance, problem, t, loops)
        assert starts
        s = make_state(t, instance, starts[-1].orders)
        assert loops.sweep(t, s)
        r = make_trial(t, s, seed)
        best, size = s.order.copy(), s.length.copy()
        heats = np.array([0.3, 0.03, 0.99])
        kept = loops.anneal(t, s, r, best, size, heats, np.array([0.02, 1e18, 10, 60, 85, 8.0, 50.0]), 400)
        lanes = [order[:length].tolist() for order, length in zip(best, size, strict=True)]
        found.append(([start.time_s for start in starts], kept, lanes, s.value.tolist(), heats.tolist()))
    assert found[0] == found[1]
    assert found[0][1] > 5, "too few moves were kept to tell"
