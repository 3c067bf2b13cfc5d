"""Steady states against a plain check of one period, building blocks, and what families repeat."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pipefit.schedule import FAMILIES, ScheduleProblem, linear_placement, uniform_costs, vee_placement
from pipefit.schedule.fit.instance import B, F, FitInstance, I, W
from pipefit.schedule.fit.kernels.unit_cycle import SteadyState, cycle_of
from pipefit.schedule.fit.starts.modulo import find_steady_state
from pipefit.simulate import simulate_schedule

MEASURED = {"forward_s": 28.0, "input_s": 28.0, "weight_s": 20.0, "transfer_s": 4.0}
"""Profiled ratios of a 14.6B model (arXiv 2401.10241, table 6)."""


def instance_of(placement: tuple[int, ...], units: float, seed: int | None = None, **times: float) -> FitInstance:
    costs = uniform_costs(placement, **times)
    if seed is not None:
        random = np.random.default_rng(seed)
        actions = {
            kind: replace(table, time_s=table.time_s * random.lognormal(0.0, 0.3, (len(placement), 1, 1)))
            for kind, table in costs.actions.items()
        }
        both = actions["I"].time_s + actions["W"].time_s
        costs = replace(costs, actions={**actions, "B": replace(actions["B"], time_s=both * 0.9)})
    lanes = max(placement) + 1
    return FitInstance.from_problem(
        ScheduleProblem(placement=placement, microbatches=8, costs=costs, limit_bytes=(float(units),) * lanes)
    )


def check(instance: FitInstance, steady: SteadyState) -> None:
    """Play a hundred microbatches and look at each lane: nothing overlaps, data is there, and memory suffices."""
    time = instance.time_s.mean(axis=2)
    back = np.where(steady.merged, time[B], time[I])
    x, period = steady.offset_s, steady.period_s
    near = 1e-6 * period
    for edge, (source, target) in enumerate(zip(instance.source, instance.target, strict=True)):
        assert x[F, target] >= x[F, source] + time[F, source] + instance.forward_s[edge, 0] - near
        assert x[I, source] >= x[I, target] + back[target] + instance.backward_s[edge, 0] - near
    assert (x[I] >= x[F] + time[F] - near).all() and (x[W] >= x[I] + back - near).all()
    events, spans = defaultdict(list), defaultdict(list)
    for unit in range(100):
        for stage, lane in enumerate(instance.placement.tolist()):
            runs = [(F, x[F, stage], F), (I, x[I, stage], B if steady.merged[stage] else I)]
            runs += [] if steady.merged[stage] else [(W, x[W, stage], W)]
            for _, start, kind in runs:
                begin, end = start + unit * period, start + unit * period + time[kind, stage]
                spans[lane].append((begin, end))
                change = float(instance.held_bytes[kind, stage, 0])
                events[lane].append((begin + near if change > 0 else end - near, change))
    for lane in range(instance.lanes):
        ordered = sorted(spans[lane])
        assert all(left[1] <= right[0] + near for left, right in pairwise(ordered))
        level = np.cumsum([change for _, change in sorted(events[lane])])
        assert level.max() <= instance.limit_bytes[lane] * (1 + 1e-6)


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(
    ("placement", "units"),
    [
        (linear_placement(4), 4),
        (linear_placement(4), 2),
        (vee_placement(4), 5),
        (vee_placement(4), 8),
        (vee_placement(6), 9),
    ],
)
def test_steady_states_are_what_they_say(placement: tuple[int, ...], units: float, seed: int | None) -> None:
    instance = instance_of(placement, units, seed, **MEASURED)
    steady = find_steady_state(instance, moves=1500)
    assert steady is not None
    check(instance, steady)
    work = float((instance.work_s() / instance.num_units).max())
    assert work - 1e-9 <= steady.bound_s <= steady.period_s * (1 + 1e-9)
    one_by_one = cycle_of(instance, steady.merged)
    assert one_by_one is not None and steady.period_s < 0.75 * (one_by_one.weight.sum() * one_by_one.scale_s)


def test_with_much_memory_the_period_is_the_work() -> None:
    """1F1B's memory suffices for a period without a bubble, on lanes and on a V."""
    for placement, units in ((linear_placement(4), 6), (vee_placement(4), 8)):
        steady = find_steady_state(instance_of(placement, units, **MEASURED))
        assert steady is not None
        assert steady.period_s == pytest.approx(76 if placement == linear_placement(4) else 152)


def test_a_limit_below_one_microbatch_has_no_steady_state() -> None:
    assert find_steady_state(instance_of(vee_placement(4), 1, **MEASURED), moves=100) is None


def repeated(name: str, d: int, **times: float) -> float:
    """How much longer a family takes for one microbatch more, after many."""
    costs = uniform_costs(vee_placement(d), **times)
    spans = []
    for microbatches in (6 * d, 9 * d):
        schedule = FAMILIES[name](ScheduleProblem(placement=vee_placement(d), microbatches=microbatches, costs=costs))
        spans.append(float(simulate_schedule(schedule, costs).makespan_s))
    return (spans[1] - spans[0]) / (3 * d)


LONG = {"forward_s": 20.0, "input_s": 30.0, "weight_s": 10.0, "transfer_s": 2.0}
"""Long sequences: attention makes I long and W short."""


@pytest.mark.parametrize(("times", "work", "block", "share"), [(MEASURED, 152, 189, 0.98), (LONG, 120, 190, 0.93)])
def test_v_min_repeats_a_longer_bubble(times: dict[str, float], work: float, block: float, share: float) -> None:
    """V-Min at d = 8 holds 8 units. With those, its slots repeat every 189 and 190, steady states every 184
    and 174."""
    instance = instance_of(vee_placement(8), 8, **times)
    steady = find_steady_state(instance)
    assert steady is not None
    check(instance, steady)
    assert repeated("v-min", 8, **times) == pytest.approx(block, abs=1.0)
    assert work < steady.period_s < block * share


def test_merging_is_chosen_where_it_pays() -> None:
    """B at 0.8 of I and W: with memory to spare, merged backwards make the shorter period."""
    costs = uniform_costs(linear_placement(3), forward_s=2.0, input_s=3.0, weight_s=2.0)
    fast = replace(costs, actions={**costs.actions, "B": replace(costs.actions["B"], time_s=np.full((1, 1, 1), 4.0))})
    steady = find_steady_state(
        FitInstance.from_problem(
            ScheduleProblem(placement=linear_placement(3), microbatches=4, costs=fast, limit_bytes=(6.0,) * 3)
        )
    )
    assert steady is not None and steady.merged.all() and steady.period_s == pytest.approx(6.0)
    split = find_steady_state(
        FitInstance.from_problem(
            ScheduleProblem(placement=linear_placement(3), microbatches=4, costs=costs, limit_bytes=(6.0,) * 3)
        )
    )
    assert split is not None and not split.merged.any() and split.period_s == pytest.approx(7.0)
