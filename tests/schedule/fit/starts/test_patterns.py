"""Patterns: the same orders as the published adaptive search builds, block by block, ranked by true times."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.schedules.adaptive import Means, schedule_block, search
from benchmarks.schedules.adaptive import blocks as published_blocks
from pipefit.schedule import ScheduleProblem, check_schedule, linear_placement, uniform_costs, vee_placement
from pipefit.schedule.blocks.passes import name_actions
from pipefit.schedule.fit.instance import FitInstance, schedule_of
from pipefit.schedule.fit.kernels.arrays import PLAIN, compile_loops, make_state, make_tables
from pipefit.schedule.fit.search import fit_schedule
from pipefit.schedule.fit.starts.patterns import all_blocks, make_scratch, pattern_starts
from pipefit.simulate import simulate_schedule


def vee_problem(devices: int, microbatches: int, limit: float, seed: int) -> ScheduleProblem:
    """Uneven stages on a V."""
    factor = np.random.default_rng(seed).lognormal(0.0, 0.3, 2 * devices)
    columns = [tuple((time * factor).tolist()) for time in (28.0, 28.0, 20.0)]
    costs = uniform_costs(
        vee_placement(devices), forward_s=columns[0], input_s=columns[1], weight_s=columns[2], transfer_s=4.0
    )
    return ScheduleProblem(
        placement=vee_placement(devices), microbatches=microbatches, costs=costs, limit_bytes=(limit,) * devices
    )


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (3, 7), (4, 5), (4, 9), (5, 10)])
def test_every_block_leads_to_the_published_order(devices: int, microbatches: int) -> None:
    """Also with fewer than two microbatches a lane, which the published program fills up and cuts off."""
    problem = vee_problem(devices, microbatches, float("inf"), 0)
    instance = FitInstance.from_problem(problem, "span")
    t = make_tables(instance)
    s = make_state(t, instance, [np.zeros(0, dtype=np.int32)] * devices)
    p, values = make_scratch(devices, microbatches), np.zeros(1)
    slots, hops = all_blocks(devices)
    published = {(block.forward, block.backward, block.weight): block for block in published_blocks(devices)}
    assert len(published) == len(slots)
    built = 0
    for n in range(len(slots)):
        compile_loops().patterns(t, s, p, slots[n : n + 1], hops[n : n + 1], values)
        down, up = p.offset[:, ::2].tolist(), p.offset[::-1, 1::2].tolist()
        block = published.pop(tuple(tuple(row[kind] for row in (*down, *up)) for kind in range(3)))  # type: ignore[arg-type]
        lanes = schedule_block(block, microbatches, 2 * devices)
        if lanes is None or (microbatches <= devices):
            assert (lanes is None) == (values[0] >= 1e299)
            continue
        built += 1
        orders = [s.order[lane, : s.length[lane]].astype(np.int32) for lane in range(devices)]
        assert schedule_of(instance, orders).lanes == name_actions(lanes, 1)
    assert built > 20


@pytest.mark.parametrize("seed", range(6))
def test_never_worse_than_the_adaptive_search(seed: int) -> None:
    """The best pattern and, with hardly any moves, `fit_schedule`."""
    draw = random.Random(seed)
    devices, microbatches = draw.randint(3, 5), draw.randint(10, 14)
    limit = draw.randint(devices, 2 * devices)
    problem = vee_problem(devices, microbatches, limit, seed)
    assert problem.costs is not None
    means = Means(*(float(problem.costs.actions[kind].time_s.mean()) for kind in "FIW"), 4.0)
    found = search(devices, microbatches, limit, means)
    instance = FitInstance.from_problem(problem, "span")
    starts = pattern_starts(instance, make_tables(instance), compile_loops())
    assert bool(starts) == (found is not None)
    if found is None:
        return
    timeline = simulate_schedule(found.schedule, problem.costs)
    span = max(stop[-1] - start[0] for start, stop in zip(timeline.starts_s, timeline.stops_s, strict=True))
    assert starts[0].time_s <= span * (1 + 1e-12)
    assert fit_schedule(problem, moves=10, objective="span").time_s <= span * (1 + 1e-12)
    for start in starts:
        schedule = schedule_of(instance, start.orders)
        check_schedule(schedule)
        timeline = simulate_schedule(schedule, problem.costs)
        assert (timeline.peak_bytes <= limit * (1 + 1e-9)).all()


def test_numba_changes_nothing() -> None:
    instance = FitInstance.from_problem(vee_problem(3, 6, 5.0, 1))
    plain, fast = (pattern_starts(instance, make_tables(instance), loops) for loops in (PLAIN, compile_loops()))
    assert [(one.time_s, one.name) for one in plain] == [(one.time_s, one.name) for one in fast]
    assert plain and all(
        (a == b).all()
        for one, other in zip(plain, fast, strict=True)
        for a, b in zip(one.orders, other.orders, strict=True)
    )


def test_patterns_are_for_whole_microbatches_on_a_vee() -> None:
    def starts(problem: ScheduleProblem) -> list[object]:
        instance = FitInstance.from_problem(problem)
        return list(pattern_starts(instance, make_tables(instance), compile_loops()))

    placement = vee_placement(3)
    costs = uniform_costs(placement)
    assert starts(ScheduleProblem(placement=placement, microbatches=6, costs=costs))
    assert not starts(ScheduleProblem(placement=placement, microbatches=6, slices=2, costs=costs))
    assert not starts(
        ScheduleProblem(placement=linear_placement(3), microbatches=6, costs=uniform_costs(linear_placement(3)))
    )
    fused = replace(costs, actions={kind: costs.actions[kind] for kind in "FB"})
    assert not starts(ScheduleProblem(placement=placement, microbatches=6, costs=fused))
