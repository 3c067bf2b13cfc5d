"""Patterns: the same orders as the published adaptive search builds, block by block, ranked by true times."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipefit.schedule import Problem, check, linear, uniform_costs, vee
from pipefit.schedule.blocks.passes import actions
from pipefit.schedule.fit.instance import Instance, schedule_of
from pipefit.schedule.fit.kernels.arrays import PLAIN, compiled, state, tables
from pipefit.schedule.fit.search import fit
from pipefit.schedule.fit.starts.patterns import blocks, pattern_starts, scratch
from pipefit.simulate import simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from baselines.adaptive import Means, schedule_block, search
from baselines.adaptive import blocks as published_blocks


def vee_problem(devices: int, microbatches: int, limit: float, seed: int) -> Problem:
    """Uneven stages on a V."""
    factor = np.random.default_rng(seed).lognormal(0.0, 0.3, 2 * devices)
    columns = [tuple((time * factor).tolist()) for time in (28.0, 28.0, 20.0)]
    costs = uniform_costs(vee(devices), forward_s=columns[0], input_s=columns[1], weight_s=columns[2], transfer_s=4.0)
    return Problem(placement=vee(devices), microbatches=microbatches, costs=costs, limit_bytes=(limit,) * devices)


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (3, 7), (4, 5), (4, 9), (5, 10)])
def test_every_block_leads_to_the_published_order(devices: int, microbatches: int) -> None:
    """Also with fewer than two microbatches a lane, which the published program fills up and cuts off."""
    problem = vee_problem(devices, microbatches, float("inf"), 0)
    instance = Instance.of(problem, "span")
    t = tables(instance)
    s = state(t, instance, [np.zeros(0, dtype=np.int32)] * devices)
    p, values = scratch(devices, microbatches), np.zeros(1)
    slots, hops = blocks(devices)
    published = {(block.forward, block.backward, block.weight): block for block in published_blocks(devices)}
    assert len(published) == len(slots)
    built = 0
    for n in range(len(slots)):
        compiled().patterns(t, s, p, slots[n : n + 1], hops[n : n + 1], values)
        down, up = p.offset[:, ::2].tolist(), p.offset[::-1, 1::2].tolist()
        block = published.pop(tuple(tuple(row[kind] for row in (*down, *up)) for kind in range(3)))  # type: ignore[arg-type]
        lanes = schedule_block(block, microbatches, 2 * devices)
        if lanes is None or (microbatches <= devices):
            assert (lanes is None) == (values[0] >= 1e299)
            continue
        built += 1
        orders = [s.order[lane, : s.length[lane]].astype(np.int32) for lane in range(devices)]
        assert schedule_of(instance, orders).lanes == actions(lanes, 1)
    assert built > 20


@pytest.mark.parametrize("seed", range(6))
def test_never_worse_than_the_adaptive_search(seed: int) -> None:
    """The best pattern and, with hardly any moves, `fit`."""
    draw = random.Random(seed)
    devices, microbatches = draw.randint(3, 5), draw.randint(10, 14)
    limit = draw.randint(devices, 2 * devices)
    problem = vee_problem(devices, microbatches, limit, seed)
    assert problem.costs is not None
    means = Means(*(float(problem.costs.actions[kind].time_s.mean()) for kind in "FIW"), 4.0)
    found = search(devices, microbatches, limit, means)
    instance = Instance.of(problem, "span")
    starts = pattern_starts(instance, tables(instance), compiled())
    assert bool(starts) == (found is not None)
    if found is None:
        return
    timeline = simulate(found.schedule, problem.costs)
    span = max(stop[-1] - start[0] for start, stop in zip(timeline.starts_s, timeline.stops_s, strict=True))
    assert starts[0].time_s <= span * (1 + 1e-12)
    assert fit(problem, moves=10, objective="span").time_s <= span * (1 + 1e-12)
    for start in starts:
        schedule = schedule_of(instance, start.orders)
        check(schedule)
        timeline = simulate(schedule, problem.costs)
        assert (timeline.peak_bytes <= limit * (1 + 1e-9)).all()


def test_numba_changes_nothing() -> None:
    instance = Instance.of(vee_problem(3, 6, 5.0, 1))
    plain, fast = (pattern_starts(instance, tables(instance), loops) for loops in (PLAIN, compiled()))
    assert [(one.time_s, one.name) for one in plain] == [(one.time_s, one.name) for one in fast]
    assert plain and all(
        (a == b).all()
        for one, other in zip(plain, fast, strict=True)
        for a, b in zip(one.orders, other.orders, strict=True)
    )


def test_patterns_are_for_whole_microbatches_on_a_vee() -> None:
    def starts(problem: Problem) -> list[object]:
        instance = Instance.of(problem)
        return list(pattern_starts(instance, tables(instance), compiled()))

    placement = vee(3)
    costs = uniform_costs(placement)
    assert starts(Problem(placement=placement, microbatches=6, costs=costs))
    assert not starts(Problem(placement=placement, microbatches=6, slices=2, costs=costs))
    assert not starts(Problem(placement=linear(3), microbatches=6, costs=uniform_costs(linear(3))))
    fused = replace(costs, actions={kind: costs.actions[kind] for kind in "FB"})
    assert not starts(Problem(placement=placement, microbatches=6, costs=fused))
