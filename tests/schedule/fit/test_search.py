"""Fitting: legal, within memory by the simulator's curves, optimal where that is known, never worse than a family."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.fit.kernels.test_sweep import random_problem

from pipefit.cost.types import CostTable
from pipefit.errors import ScheduleError
from pipefit.schedule import (
    FAMILIES,
    ScheduleProblem,
    check_schedule,
    find_family,
    linear_placement,
    lower_schedule,
    uniform_costs,
    vee_placement,
)
from pipefit.schedule.fit.instance import FitInstance, orders_of, schedule_of
from pipefit.schedule.fit.result import FitResult
from pipefit.schedule.fit.search import fit_schedule
from pipefit.schedule.fit.starts.construct import allowed_orders
from pipefit.schedule.problem import chain_edges
from pipefit.simulate import Timeline, simulate_schedule

OPTIMUM = json.loads((Path(__file__).parent / "optimum.json").read_text())["proven"]


def uneven(devices: int, seed: int, **times: float) -> CostTable:
    """A V whose stages differ, lognormal with sigma 0.3, the last one half as long again."""
    placement = vee_placement(devices)
    costs = uniform_costs(placement, **times)
    spread = np.random.default_rng(seed).lognormal(0.0, 0.3, 2 * devices)
    spread[-1] *= 1.5
    actions = {
        kind: replace(table, time_s=table.time_s * spread.reshape(-1, 1, 1)) for kind, table in costs.actions.items()
    }
    return replace(costs, actions=actions)


def with_buffers(costs: CostTable, size: float, port_s: float) -> CostTable:
    edges = tuple(
        replace(
            edge,
            forward_bytes=np.full((1, 1), size),
            backward_bytes=np.full((1, 1), size),
            forward_port_s=np.full((1, 1), port_s),
            backward_port_s=np.full((1, 1), port_s),
        )
        for edge in costs.edges
    )
    return replace(costs, edges=edges)


def verified(problem: ScheduleProblem, found: FitResult) -> Timeline:
    """Everything a fit says, held against the simulator and the checker."""
    assert problem.costs is not None
    assert found.schedule.name == "fit" and not found.schedule.is_lowered
    check_schedule(found.schedule, problem.stage_edges)
    computed = simulate_schedule(found.schedule, problem.costs, problem.stage_edges)
    assert found.time_s == pytest.approx(computed.compute_end_s, rel=1e-12)
    lowered = lower_schedule(found.schedule, problem.stage_edges, problem.costs, reductions=(), optimizer=False)
    timeline = simulate_schedule(lowered, problem.costs)
    assert timeline.makespan_s == pytest.approx(found.time_s, rel=1e-12)
    assert found.peak_bytes == pytest.approx(timeline.peak_bytes.tolist())
    if problem.limit_bytes is not None:
        assert (timeline.peak_bytes <= np.array(problem.limit_bytes) * (1 + 1e-9)).all()
    assert 0 < found.bound_s <= found.time_s
    assert found.relative_gap == pytest.approx(1 - found.bound_s / found.time_s)
    return timeline


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_problems(seed: int) -> None:
    """Uneven stages, DAGs, ports, slices, split memory, tight limits: legal, within memory, no family better."""
    problem = random_problem(random.Random(seed))
    assert problem.costs is not None and problem.limit_bytes is not None
    try:
        found = fit_schedule(problem, moves=600, seed=seed)
    except ScheduleError as error:
        assert "one microbatch alone needs more" in str(error)
        return
    verified(problem, found)
    for other in FAMILIES.values():
        if other.name == "fit" or problem.microbatches * problem.slices < other.least_units(problem.num_lanes):
            continue
        try:
            schedule = other(problem)
        except ScheduleError:
            continue
        lowered = lower_schedule(schedule, problem.stage_edges, problem.costs, reductions=(), optimizer=False)
        timeline = simulate_schedule(lowered, problem.costs)
        if (timeline.peak_bytes <= np.array(problem.limit_bytes)).all():
            assert found.time_s <= timeline.makespan_s * (1 + 1e-12), other.name


@pytest.mark.parametrize("case", [case for case in OPTIMUM if case[1] <= 4 and case[2] <= 6 and case[2] > 1])
def test_proven_optima_in_unit_time(case: tuple[str, int, int, int, int]) -> None:
    """The bubbles that an exact solver proved least, on linear and V placements."""
    name, lanes, microbatches, units, bubble = case
    placement = {"linear": linear_placement, "vee": vee_placement}[name](lanes)
    problem = ScheduleProblem(
        placement=placement,
        microbatches=microbatches,
        costs=uniform_costs(placement),
        limit_bytes=(float(units),) * lanes,
    )
    found = fit_schedule(problem, moves=10_000, objective="span")
    work = 3 * microbatches * len(placement) // lanes
    assert found.time_s == work + bubble
    assert found.bubble == pytest.approx(bubble / (work + bubble))


def test_unequal_times_beat_every_family_by_much() -> None:
    """Eight uneven devices with half of 1F1B's memory: what the fixed orders lose, and that more moves lose less."""
    costs = uneven(8, 1, forward_s=28, input_s=28, weight_s=20, transfer_s=4)
    problem = ScheduleProblem(placement=vee_placement(8), microbatches=16, costs=costs, limit_bytes=(10.0,) * 8)
    fixed = min(
        simulate_schedule(schedule, costs).makespan_s
        for schedule in (find_family(name)(problem) for name in ("v-min", "v-half"))
    )
    few, many = fit_schedule(problem, moves=0), fit_schedule(problem, moves=40_000)
    verified(problem, many)
    assert few.time_s <= fixed
    assert many.time_s < 0.97 * fixed
    assert many.time_s < few.time_s
    assert many.moves <= 40_000 and many.how


def test_memory_buys_time() -> None:
    costs = uneven(4, 2, forward_s=3, input_s=4, weight_s=2, transfer_s=0.2)
    times = [
        fit_schedule(
            ScheduleProblem(placement=vee_placement(4), microbatches=8, costs=costs, limit_bytes=(limit,) * 4),
            moves=10_000,
        ).time_s
        for limit in (3.0, 4.0, 6.0, 8.0)
    ]
    assert times == sorted(times, reverse=True) and times[0] > 1.2 * times[-1]


def test_many_microbatches_begin_from_few() -> None:
    costs = uniform_costs(vee_placement(4), forward_s=20, input_s=30, weight_s=10, transfer_s=2)
    problem = ScheduleProblem(placement=vee_placement(4), microbatches=64, costs=costs, limit_bytes=(4.0,) * 4)
    found = fit_schedule(problem, moves=8_000)
    verified(problem, found)
    fixed = simulate_schedule(find_family("v-min")(problem), costs).makespan_s
    assert found.time_s < 0.9 * fixed
    assert "extended" in found.how


def test_receive_buffers_count() -> None:
    """A limit that the actions alone would fill: buffers must fit, too, and static bytes lie under all of it."""
    costs = with_buffers(uniform_costs(vee_placement(4), forward_s=3, input_s=3, weight_s=2, transfer_s=0.5), 0.25, 0.2)
    costs = replace(costs, static_bytes=np.full(4, 10.0))
    problem = ScheduleProblem(placement=vee_placement(4), microbatches=8, costs=costs, limit_bytes=(16.0,) * 4)
    found = fit_schedule(problem, moves=5_000)
    verified(problem, found)
    assert max(found.peak_bytes) > 15.0
    plain = fit_schedule(replace(problem, costs=with_buffers(costs, 0.0, 0.2)), moves=5_000)
    assert plain.time_s <= found.time_s


def test_merged_backwards_where_they_are_quicker() -> None:
    """B saves a fifth of I and W: most backwards merge, some W's still fill bubbles."""
    costs = uniform_costs(vee_placement(4), forward_s=3, input_s=3, weight_s=2, transfer_s=0.5)
    cheap = replace(costs.actions["B"], time_s=np.full((1, 1, 1), 4.0))
    quicker = replace(costs, actions={**costs.actions, "B": cheap})
    problem = ScheduleProblem(placement=vee_placement(4), microbatches=8, costs=quicker, limit_bytes=(8.0,) * 4)
    found = fit_schedule(problem, moves=20_000)
    verified(problem, found)
    kinds = [action.kind for _, _, action in found.schedule]
    assert kinds.count("B") > kinds.count("W") > 0
    never = {kind: table for kind, table in quicker.actions.items() if kind != "B"}
    split = fit_schedule(replace(problem, costs=replace(costs, actions=never)), moves=20_000)
    assert "B" not in {action.kind for _, _, action in split.schedule}
    merged = fit_schedule(
        replace(problem, costs=replace(costs, actions={"F": costs.actions["F"], "B": cheap})), moves=20_000
    )
    assert {action.kind for _, _, action in merged.schedule} == {"F", "B"}
    assert found.time_s < min(split.time_s, merged.time_s)


def test_neighbours_become_one_action_where_it_costs_nothing() -> None:
    """I and its W next to each other run as B, which spares the overhead of an action."""
    costs = replace(uniform_costs(linear_placement(2), forward_s=2, input_s=2, weight_s=1), overhead_s=0.01)
    problem = ScheduleProblem(placement=linear_placement(2), microbatches=6, costs=costs, limit_bytes=(2.0,) * 2)
    found = fit_schedule(problem, moves=3_000)
    verified(problem, found)
    assert "B" in {action.kind for _, _, action in found.schedule}


def recomputed(costs: CostTable, kept: float) -> CostTable:
    """Full recomputation: backwards run the forward again, and hold less until then."""
    actions = dict(costs.actions)
    forward = actions["F"]
    actions["F"] = replace(forward, held_bytes=forward.held_bytes * kept)
    for kind in ("I", "B"):
        table = actions[kind]
        again = np.full((1, 1, 1), 1.0 - kept)
        actions[kind] = replace(table, time_s=table.time_s + forward.time_s, peak_bytes=again)
    for kind in ("B", "W"):
        actions[kind] = replace(actions[kind], held_bytes=actions[kind].held_bytes * kept)
    return replace(costs, actions=actions)


@pytest.mark.parametrize("limit", [4.0, 6.0, 16.0])
def test_recomputation_is_chosen_by_stage_where_it_pays(limit: float) -> None:
    """With little memory nearly everywhere (the last stage goes back at once, so keeping costs it little), with much
    nowhere, and between on some stages, better than either for all."""
    costs = uniform_costs(vee_placement(8), forward_s=28, input_s=28, weight_s=20, transfer_s=4)
    options = {"none": costs, "full": recomputed(costs, 0.2)}
    problem = ScheduleProblem(placement=vee_placement(8), microbatches=16, limit_bytes=(limit,) * 8)
    found = fit_schedule(problem, options=options, moves=20_000)
    alone = [fit_schedule(replace(problem, costs=table), moves=20_000).time_s for table in options.values()]
    assert len(found.recompute) == 16
    if limit == 6:
        assert set(found.recompute) == {"none", "full"} and found.time_s < 0.99 * min(alone)
    else:
        assert found.recompute.count("full") >= 14 if limit == 4 else set(found.recompute) == {"none"}
        assert found.time_s < 1.04 * min(alone)


def test_the_same_again() -> None:
    problem = ScheduleProblem(placement=vee_placement(3), microbatches=6, costs=uneven(3, 4), limit_bytes=(4.0,) * 3)
    one, two = fit_schedule(problem, moves=3_000, seed=5), fit_schedule(problem, moves=3_000, seed=5)
    assert one == two
    assert fit_schedule(problem, moves=300, seed=5, use_numba=False) == fit_schedule(problem, moves=300, seed=5)
    hurried = fit_schedule(problem, moves=10**9, seconds=0.05)
    verified(problem, hurried)
    assert hurried.moves < 10**7


def test_seconds_are_the_whole_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound, merging and simulation included; by the processor's clock, which other work leaves alone."""
    costs = uneven(8, 3, forward_s=28, input_s=28, weight_s=20, transfer_s=4)
    problem = ScheduleProblem(placement=vee_placement(8), microbatches=32, costs=costs, limit_bytes=(9.0,) * 8)
    fit_schedule(problem, moves=300)  # compiled, families built
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    began = time.process_time()
    found = fit_schedule(problem, moves=10**9, seconds=1.5)
    assert 1.0 < time.process_time() - began < 1.65
    verified(problem, found)


def test_what_reaches_the_bound_ends_the_search() -> None:
    costs = uniform_costs(vee_placement(8), forward_s=28, input_s=28, weight_s=20, transfer_s=4)
    problem = ScheduleProblem(placement=vee_placement(8), microbatches=32, costs=costs, limit_bytes=(10.0,) * 8)
    found = fit_schedule(problem, moves=10**9, objective="span")
    assert found.relative_gap < 1e-9 and found.moves < 10**6


def test_the_family_fits_unit_time_and_costs() -> None:
    bare = ScheduleProblem(placement=vee_placement(3), microbatches=6)
    assert (
        find_family("fit")(bare).lanes == find_family("fit")(replace(bare, costs=uniform_costs(vee_placement(3)))).lanes
    )
    tight = replace(bare, costs=uniform_costs(vee_placement(3)), limit_bytes=(2.0,) * 3)
    peaks = simulate_schedule(lower_schedule(find_family("fit")(tight)), tight.costs).peak_bytes if tight.costs else []
    assert max(peaks) == 2.0


def problem_with(kind: str, time_s: float) -> ScheduleProblem:
    costs = uniform_costs(linear_placement(2))
    table = replace(costs.actions[kind], time_s=np.array([1.0, time_s]).reshape(2, 1, 1))
    return ScheduleProblem(
        placement=linear_placement(2), microbatches=2, costs=replace(costs, actions={**costs.actions, kind: table})
    )


@pytest.mark.parametrize(
    ("kind", "time_s", "text"),
    [
        ("F", 0.0, "F of stage 1, microbatch 0"),
        ("F", -1.0, "F of stage 1, microbatch 0"),
        ("B", 0.0, "B of stage 1, microbatch 0"),
        ("W", -2.0, "W of stage 1, microbatch 0"),
        ("I", float("nan"), "I of stage 1, microbatch 0"),
    ],
)
def test_times_that_no_schedule_can_be_made_for(kind: str, time_s: float, text: str) -> None:
    with pytest.raises(ScheduleError) as error:
        fit_schedule(problem_with(kind, time_s))
    assert text in str(error.value) and "An action has a time that no schedule can be made for." in str(error.value)
    assert f"seen: {time_s:g} s" in str(error.value)


def without_weights(stage: int, merged_s: float) -> ScheduleProblem:
    """W of a stage takes no time, I one second, and B `merged_s`."""
    costs = uniform_costs(linear_placement(2))
    times = {"W": np.ones((2, 1, 1)), "B": np.full((2, 1, 1), 2.0)}
    times["W"][stage], times["B"][stage] = 0.0, merged_s
    actions = {kind: replace(costs.actions[kind], time_s=table) for kind, table in times.items()}
    return ScheduleProblem(
        placement=linear_placement(2), microbatches=4, costs=replace(costs, actions={**costs.actions, **actions})
    )


def test_a_stage_without_weights_never_splits_unless_that_is_quicker() -> None:
    found = fit_schedule(without_weights(1, 1.0), moves=500)
    assert not any(action.kind == "W" and action.stage == 1 for _, _, action in found.schedule)
    for problem in (without_weights(1, 1.5), without_weights(0, 1.5)):
        assert problem.costs is not None
        found = fit_schedule(problem, moves=500)
        verified(problem, found)
        assert found.time_s <= simulate_schedule(find_family("zb-h1")(problem), problem.costs).makespan_s


@pytest.mark.parametrize("kinds", ["FB", "FIW", "FIWB"])
@pytest.mark.parametrize("placement", [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 1, 1, 0)])
def test_tables_of_some_actions_on_all_placements(placement: tuple[int, ...], kinds: str) -> None:
    """Families with other actions are made to use those that there are; a lane alone never waits."""
    costs = uniform_costs(placement, forward_s=2.0, input_s=3.0, weight_s=1.0, transfer_s=0.5)
    costs = replace(costs, actions={kind: costs.actions[kind] for kind in kinds})
    for microbatches in (1, 3, 4):
        problem = ScheduleProblem(placement=placement, microbatches=microbatches, costs=costs)
        found = fit_schedule(problem, moves=300)
        verified(problem, found)
        assert {action.kind for _, _, action in found.schedule} <= set(kinds)
        if max(placement) == 0:
            assert found.time_s == found.bound_s == 6.0 * microbatches * len(placement)


def test_orders_with_the_actions_that_are_allowed() -> None:
    """B becomes I and the next W of its stage, and I with W becomes B, within dependencies: merging and parting."""
    whole = ScheduleProblem(placement=vee_placement(3), microbatches=5, costs=uniform_costs(vee_placement(3)))
    assert whole.costs is not None
    for name in ("v-half", "zb-v", "1f1b-v", "v-min"):
        schedule = find_family(name)(whole)
        for kinds in ("FIW", "FB", "FIWB"):
            costs = replace(whole.costs, actions={kind: whole.costs.actions[kind] for kind in kinds})
            instance = FitInstance.from_problem(replace(whole, costs=costs))
            made = schedule_of(instance, allowed_orders(instance, orders_of(instance, schedule)))
            check_schedule(made)
            assert {action.kind for _, _, action in made} <= set(kinds)
            assert kinds != "FIWB" or made.lanes == schedule.lanes
            assert (
                kinds != "FIW"
                or simulate_schedule(made, costs).makespan_s <= simulate_schedule(schedule, whole.costs).makespan_s
            )


def test_a_limit_below_what_any_schedule_needs() -> None:
    """It names the least, and with the least it works."""
    costs = with_buffers(uneven(3, 5), 0.125, 0.0)
    problem = ScheduleProblem(placement=vee_placement(3), microbatches=4, costs=costs, limit_bytes=(2.0, 1.5, 2.5))
    with pytest.raises(ScheduleError) as error:
        fit_schedule(problem)
    text = str(error.value)
    assert "No schedule fits in the memory limit: one microbatch alone needs more." in text
    assert "where: lane 1" in text and "seen: 1.5 bytes" in text
    least = tuple(float(value) for value in text.split("by lane: ")[1].split("\n")[0].split(", "))
    assert f"allowed: {least[1]:g} bytes or more" in text and "recompute activations" in text
    verified(replace(problem, limit_bytes=least), fit_schedule(replace(problem, limit_bytes=least), moves=500))
    options = {"none": costs, "full": recomputed(costs, 0.5)}
    with pytest.raises(ScheduleError, match="one microbatch alone needs more"):
        fit_schedule(replace(problem, limit_bytes=(0.5,) * 3), options=options)


def test_what_else_is_refused() -> None:
    with pytest.raises(ScheduleError, match="needs the times and the memory of its actions"):
        fit_schedule(ScheduleProblem(placement=linear_placement(2), microbatches=2))
    costs = uniform_costs(linear_placement(2))
    with pytest.raises(ScheduleError, match="lacks the times of a forward or a backward"):
        fit_schedule(
            ScheduleProblem(
                placement=linear_placement(2), microbatches=2, costs=replace(costs, actions={"F": costs.actions["F"]})
            )
        )
    fused = replace(costs, actions={kind: costs.actions[kind] for kind in "FB"})
    with pytest.raises(ScheduleError, match="must be cost tables of the same actions"):
        fit_schedule(
            ScheduleProblem(placement=linear_placement(2), microbatches=2), options={"none": costs, "full": fused}
        )
    with pytest.raises(ScheduleError, match="must be cost tables of the same actions"):
        fit_schedule(ScheduleProblem(placement=linear_placement(2), microbatches=2), options={})


def test_an_instance_says_what_it_holds() -> None:
    costs = replace(uniform_costs(vee_placement(2), transfer_s=0.5), overhead_s=0.1, static_bytes=np.array([1.0, 2.0]))
    problem = ScheduleProblem(
        placement=vee_placement(2), microbatches=2, slices=2, edges=chain_edges(4), costs=costs, limit_bytes=(5.0, 5.0)
    )
    instance = FitInstance.from_problem(problem)
    assert instance.backwards.tolist() == [1, 0, 3, 2]
    assert instance.limit_bytes.tolist() == [4.0, 3.0]
    assert instance.time_s[0, 0, 0] == 1.1 and instance.work_s().tolist() == [4 * 2 * 3.2] * 2
    assert instance.forward_s[:, 0].tolist() == [0.5, 0.0, 0.5]
    assert instance.operation_parts(instance.operation_number(2, 3, 1)) == (2, 3, 1)
