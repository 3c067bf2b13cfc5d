"""Slices in the search: bounds against the simulator, memory against orders, the winner against everything."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.cluster import Cluster
from pipefit.cost.types import Array, CostTable
from pipefit.errors import PlanError, ScheduleError
from pipefit.plan.bounds.sliced_bounds import min_sliced_in_flight, sliced_bound_s
from pipefit.plan.bounds.step_bounds import table_bound_s
from pipefit.plan.candidates.slicings import SequenceSlicer
from pipefit.plan.candidates.space import iter_candidates, iter_grids
from pipefit.plan.candidates.space_checks import check_space
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.explain.slice_notes import slice_note
from pipefit.plan.explain.text import alternative_table, forecast_lines
from pipefit.plan.make import make_plan
from pipefit.plan.passes.reslice import reslice_best
from pipefit.plan.passes.search import LayoutSearch, search_plans
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints, parse_constraints
from pipefit.plan.slicing.terapipe import best_slicing
from pipefit.plan.types import Job
from pipefit.schedule.families import FAMILIES
from pipefit.schedule.lowering.lower import lower_schedule
from pipefit.schedule.problem import ScheduleProblem, uniform_costs
from pipefit.simulate import simulate_schedule

LONG = Job(batch=2, sequence=65536)
"""Two sequences that are long enough for slices of these toys."""

SLICED = [name for name in sorted(FAMILIES) if name != "fit"]


def random_costs(draw: random.Random, placement: tuple[int, ...], slices: int) -> CostTable:
    """Every stage and slice has times of its own, and every edge."""

    def times(*shape: int) -> Array:
        return np.array([draw.choice((0.2, 1.0, 3.0)) * draw.random() for _ in range(int(np.prod(shape)))]).reshape(
            shape
        )

    costs = uniform_costs(placement)
    stages = len(placement)
    actions = {kind: replace(table, time_s=times(stages, 1, slices)) for kind, table in costs.actions.items()}
    edges = tuple(
        replace(edge, forward_s=times(1, slices), backward_s=times(1, slices), forward_port_s=np.zeros((1, slices)))
        for edge in costs.edges
    )
    return replace(costs, actions=actions, edges=edges, reduce_s=times(stages), overhead_s=0.1)


def made(name: str, placement: tuple[int, ...], microbatches: int, slices: int):  # type: ignore[no-untyped-def]
    """The order of a family, or None where it has none."""
    try:
        return FAMILIES[name](ScheduleProblem(placement=placement, microbatches=microbatches, slices=slices))
    except ScheduleError:
        return None


@pytest.mark.parametrize("name", SLICED)
def test_no_sliced_bound_exceeds_the_simulated_time(name: str) -> None:
    """With random times of every stage, slice and transfer."""
    draw, tight = random.Random(7), []
    for _ in range(40):
        lanes, microbatches, slices = draw.choice((2, 3, 4)), draw.choice((1, 2, 4)), draw.choice((2, 3, 5))
        placement = FAMILIES[name].placement(lanes)
        order = made(name, placement, microbatches, slices)
        if order is None:
            continue
        costs = random_costs(draw, placement, slices)
        simulated = simulate_schedule(
            lower_schedule(order, costs=costs, reductions=tuple(range(len(placement)))), costs
        ).makespan_s
        bound = table_bound_s(costs, placement, microbatches, name)
        assert bound <= simulated * (1 + 1e-9), (placement, microbatches, slices)
        tight.append(bound / simulated)
    assert len(tight) > 5 and max(tight) > (0.8 if FAMILIES[name].fused else 0.5), "a bound of nothing would pass"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_sliced_bound_is_the_time_of_equal_stages_and_slices(name: str) -> None:
    """(m + (K - 1) / s) (f + b), what TeraPipe's formula gives equal slices."""
    lanes, microbatches, slices, forward_s, backward_s = 6, 3, 4, 1.0, 2.0
    placement = tuple(range(lanes))
    forward, backward = np.full((slices, lanes), forward_s / slices), np.full((slices, lanes), backward_s / slices)
    bound = sliced_bound_s(forward, backward, placement, microbatches, fused=True)
    assert bound == pytest.approx((microbatches + (lanes - 1) / slices) * (forward_s + backward_s))
    costs = uniform_costs(placement, forward_s=0.25, input_s=0.25, weight_s=0.25)
    assert simulate_schedule(made(name, placement, microbatches, slices), costs).makespan_s == pytest.approx(bound)


@pytest.mark.parametrize("name", SLICED)
def test_lanes_hold_no_less_than_the_closed_form_of_slices_says(name: str) -> None:
    """Tokens that are in flight, against the family's own orders."""
    ratios = []
    for lanes in (2, 3, 4, 6):
        placement = FAMILIES[name].placement(lanes)
        for microbatches in (1, 2, 3, 8):
            for slices in ((3, 2), (5, 3, 2, 1), (4,) * 6):
                order = made(name, placement, microbatches, len(slices))
                if order is None:
                    continue
                floors = min_sliced_in_flight(name, placement, microbatches, slices)
                for lane, floor in zip(order.lanes, floors, strict=True):
                    change = {"F": 1, "B": -1, "I": -1, "W": 0}
                    steps = [change[action.kind] * slices[action.slice] / sum(slices) for action in lane]
                    most = float(np.cumsum(steps).max())
                    assert floor <= most + 1e-9, (lanes, microbatches, slices)
                    ratios.append(floor / most)
    assert np.mean(ratios) > (0.9 if FAMILIES[name].fused and name != "1f1b-v" else 0.5)


def everything(context: PlannerContext, job: Job, constraints: Constraints) -> list[EvaluatedPlan]:
    """Every plan of the space, simulated."""
    found = []
    count, layers, hosts = context.network.devices, len(context.only_module.layers), len(context.cluster.hosts)
    for decisions in iter_candidates(job, layers, count, hosts, constraints, context.layer_cutter):
        try:
            found.append(evaluate_candidate(context, decisions, context.make_skeleton(job, decisions)))
        except ScheduleError:
            continue
    return found


UNSHARDED = Constraints(sharded_state="none")


def slow(count: int, memory_bytes: int = 10**10) -> Cluster:
    """Devices on which these toys take long beside what an operator costs anew."""
    cluster = toy_cluster(1, count)
    kinds = {
        name: replace(kind, memory_bandwidth_bytes_per_s=4e10, memory_bytes=memory_bytes)
        for name, kind in cluster.kinds.items()
    }
    return replace(cluster, kinds=kinds)


@pytest.mark.parametrize("cluster", [slow(3), slow(3, 160_000_000)], ids=["free", "little memory"])
def test_the_search_with_slices_finds_what_trying_everything_finds(cluster: Cluster) -> None:
    context = PlannerContext(toy_model(3), cluster)
    constraints = Constraints(slice_multiple=4096, sharded_state="none", shards=(1,))
    every = everything(context, LONG, constraints)
    found = search_plans(context, LONG, constraints)
    names = {one.decisions.schedule for one in every if one.decisions.slices}
    assert names >= {"gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "v-half", "svpp"}
    fitting = [one for one in every if one.simulation.fits_in_memory]
    assert len(fitting) < len(every) or cluster.kinds["A100-80"].memory_bytes > 10**9
    best = min(fitting, key=lambda one: one.rank_key)
    assert best.decisions.slices and found.fitting[0].decisions.slices
    assert found.fitting[0].rank_key == best.rank_key
    sliced = sum(bool(one.decisions.slices) for one in every)
    assert found.considered > len(every) - sliced, "slices that promise too little are not made"
    assert found.lower_bound_s <= best.step_s
    whole = min((one for one in fitting if not one.decisions.slices), key=lambda one: one.rank_key)
    assert found.fitting[0].step_s < whole.step_s
    assert next(one for one in found.fitting if not one.decisions.slices).step_s == pytest.approx(whole.step_s)


def test_no_bound_of_a_sliced_candidate_exceeds_its_simulated_time() -> None:
    """At every level of looking, the one of the grids among them."""
    from pipefit.plan.candidates.queue import SearchCandidate, build_queues

    context, looked = PlannerContext(toy_model(2), slow(3)), 0
    searcher = LayoutSearch(context, LONG, Constraints(slice_multiple=4096), 1)
    for grid in iter_grids(
        LONG,
        len(context.only_module.layers),
        3,
        1,
        Constraints(sharded_state="none"),
        context.layer_cutter,
        searcher.slicer,
    ):
        if not grid.slices:
            continue
        queue = build_queues(searcher.floors, [grid])[0]
        while not queue.is_empty:
            for candidate in queue.take_next():
                bounds, one = [candidate.bound_s], SearchCandidate(candidate.decisions)
                while one.level < 2 and (bound := searcher.raise_level(one, bounds[-1])) is not None:
                    bounds.append(bound)
                simulated = evaluate_candidate(
                    context, one.decisions, context.make_skeleton(LONG, one.decisions)
                ).step_s
                assert len(bounds) == 3 and max(bounds) <= simulated * (1 + 1e-9), (one.decisions, bounds, simulated)
                looked += 1
    assert looked > 50


def slicer(job: Job, constraints: Constraints, devices: int = 4) -> tuple[SequenceSlicer, object]:
    context = PlannerContext(toy_model(4), slow(devices))
    made = SequenceSlicer(context.layer_cutter, job, constraints)
    return made, made.stage_work(frozenset({(context.layer_cutter.fleet.names[0], 1)}))


def test_slices_are_tried_where_microbatches_are_few_and_sequences_long() -> None:
    many, stage = slicer(LONG, NO_CONSTRAINTS)
    few = many.slice_counts(stage, 8, 1, 2)  # type: ignore[arg-type]
    assert len(few) >= 2 and min(few) > 1
    assert not many.slice_counts(stage, 8, 1, 512), "microbatches hide the filling of the pipeline"  # type: ignore[arg-type]
    short, stage = slicer(replace(LONG, sequence=256), NO_CONSTRAINTS)
    assert not short.slice_counts(stage, 8, 1, 2), "a slice costs as much as the whole sequence"  # type: ignore[arg-type]
    steps = many.closed_form_s(*slicer(LONG, NO_CONSTRAINTS)[1:], 8, 1, 2)  # type: ignore[arg-type, call-arg]
    assert np.argmin(steps) > 0


def test_slices_are_multiples_of_what_kernels_and_shards_want() -> None:
    made, stage = slicer(replace(LONG, sequence=4096 + 24), Constraints(shards=(1, 2)))
    assert made.token_multiple(4) == 192, "64 tokens of a GPU's tile, in three shares"
    assert [made.token_multiple(number) for number in (9, 17, 100)] == [96, 48, 24], (
        "short slices are not rounded to a tile"
    )
    slices = made.cut_sequence(stage, 4)  # type: ignore[arg-type]
    assert sum(slices) == 4120 and all(tokens % 192 == 0 for tokens in slices[:-1])
    assert {slicer(LONG, Constraints(slice_multiple=24))[0].token_multiple(number) for number in (2, 500)} == {24}


@pytest.mark.parametrize(("text", "value"), [("slices=4", 4), ("slices=1", 1), ("slices=512,256,256", (512, 256, 256))])
def test_a_pin_of_slices_is_a_count_or_the_tokens_of_each(text: str, value: object) -> None:
    assert parse_constraints([text]) == Constraints(slices=value)


@pytest.mark.parametrize("text", ["slices=0", "slices=a", "slices=4,", "slice_multiple=0"])
def test_a_pin_of_slices_that_is_none_says_what_is_allowed(text: str) -> None:
    with pytest.raises(PlanError, match=r"valid value for 'slice[\s\S]*allowed: (a count of slices|tokens that every)"):
        parse_constraints([text])


def test_pinned_slices_are_obeyed() -> None:
    context = PlannerContext(toy_model(4), slow(3))
    never = search_plans(context, LONG, Constraints(slices=1))
    assert never.fitting and not any(one.decisions.slices for one in never.fitting)
    four = search_plans(context, LONG, Constraints(slices=4, stages=3))
    assert {len(one.decisions.slices) for one in four.fitting} == {4}
    given = search_plans(context, LONG, Constraints(slices=(40960, 24576), stages=3, schedule="1f1b"))
    assert {one.decisions.slices for one in given.fitting} == {(40960, 24576)}
    for constraints in (Constraints(slices=20_000), Constraints(slices=2000, slice_multiple=64)):
        with pytest.raises(PlanError, match=r"cannot be cut into this number of slices[\s\S]*--fix slices"):
            search_plans(context, LONG, constraints)


def note_of(job: Job, constraints: Constraints, cluster: Cluster | None = None) -> str:
    """What a plan says of slices; the same stands in its headlines."""
    plan = make_plan(
        toy_model(3), cluster or slow(3), job, replace(constraints, slice_multiple=4096, sharded_state="none")
    )
    assert plan.prediction is not None
    [note] = [one for one in plan.prediction.assumptions if one.startswith("slices: ")]
    assert note in forecast_lines(plan)
    return note


def test_a_plan_with_slices_says_which_and_what_they_gain() -> None:
    note = note_of(LONG, Constraints(schedule="1f1b", stages=3))
    assert re.fullmatch(
        r"slices: (\d+) per sequence, of [\d, .]+ tokens; step \d+\.\d% shorter than the best plan without slices, "
        r"[\d.]+ \w+ \(1 replicas x 3 stages, 2 microbatches, 1f1b, recompute \w+, sharded state none\)",
        note,
    )
    assert "3 per sequence, of 24576, 20480, 20480 tokens, as fixed" in note_of(
        LONG, Constraints(schedule="1f1b", stages=3, slices=(24576, 20480, 20480))
    )


def test_alternatives_are_told_apart_by_their_slices() -> None:
    constraints = Constraints(slice_multiple=4096, sharded_state="none", schedule="1f1b", stages=3, recompute=("none",))
    plan = make_plan(toy_model(3), slow(3), LONG, constraints, top=24)
    table = alternative_table(plan)
    place = table.columns.index("slices")
    cells = [row[place] for row in table.rows]
    asked = [plan.decisions, *(other.decisions for other in plan.alternatives)]
    counts = [len(one.get("slices", "").split(",")) for one in asked]
    assert "1" in cells and max(counts) > 4, "some are not cut, and some in many slices"
    for cell, count, one in zip(cells, counts, asked, strict=True):
        known = one.get("slices", "1")
        first, last = known.split(",")[0], known.split(",")[-1]
        assert cell == known if count <= 4 else re.fullmatch(rf"{count} \({first},\d+,...,{last}\)", cell), cell
    whole = make_plan(toy_model(3), slow(3), LONG, replace(constraints, slices=1), top=2)
    assert "slices" not in alternative_table(whole).columns


def test_a_plan_without_slices_says_why() -> None:
    assert note_of(LONG, Constraints(slices=1, stages=2)) == "slices: not used: fixed by --fix slices=1"
    short = note_of(replace(LONG, sequence=64), Constraints(stages=2, schedule="1f1b"))
    assert "of 64 tokens and the overhead of every slice, no plan with slices was estimated to be faster" in short
    single = note_of(replace(LONG, batch=1, sequence=64), Constraints(stages=2, schedule="1f1b"))
    assert "with 1 microbatch on 2 lanes" in single
    assert "a single lane has no pipeline bubble to fill" in note_of(LONG, Constraints(stages=1, schedule="1f1b"))


def test_the_best_plan_with_slices_that_lost_is_told() -> None:
    """It is slower, or within the tolerance of a simpler plan."""
    context = PlannerContext(toy_model(3), slow(3))
    constraints = Constraints(slice_multiple=4096, stages=3, schedule="1f1b", sharded_state="none")
    found = search_plans(context, LONG, constraints)
    plain = next(plan for plan in found.fitting if not plan.decisions.slices)
    fast = next(plan for plan in found.fitting if plan.decisions.slices)
    slow_ones = search_plans(context, LONG, replace(constraints, slices=2, recompute=("full",))).fitting
    assert fast.step_s < plain.step_s < slow_ones[0].step_s
    for sliced, words in ((slow_ones[0], "longer: "), (fast, "% less")):
        note = slice_note(context, LONG, NO_CONSTRAINTS, replace(found, fitting=(plain, sliced)))
        assert re.match(r"slices: not used: the best plan with slices, \d+ slices of [\d, .]+ tokens in 1 rep", note)
        assert words in note, note


def test_the_slices_of_the_best_plan_are_searched_once_more() -> None:
    """Never slower, in its memory, and what is fixed stays."""
    context = PlannerContext(toy_model(3), slow(3))
    constraints = Constraints(slice_multiple=1024, stages=3, schedule="1f1b", sharded_state="none")
    first = search_plans(context, LONG, constraints)
    again = reslice_best(context, LONG, constraints, first)
    assert again.fitting[0].step_s < first.fitting[0].step_s and again.fitting[0].simulation.fits_in_memory
    assert again.fitting[0].decisions.slices != first.fitting[0].decisions.slices
    assert sum(again.fitting[0].decisions.slices) == LONG.sequence and again.fitting[1:] == first.fitting
    three = replace(constraints, slices=3)
    assert len(reslice_best(context, LONG, three, search_plans(context, LONG, three)).fitting[0].decisions.slices) == 3
    given = search_plans(context, LONG, replace(constraints, slices=(40960, 24576)))
    assert reslice_best(context, LONG, replace(constraints, slices=(40960, 24576)), given) is given


def test_a_best_plan_without_slices_gets_those_of_terapipes_program() -> None:
    """In a schedule that fits, faster than the program itself, which runs all forwards first."""
    context = PlannerContext(toy_model(3), slow(3))
    constraints = Constraints(slice_multiple=1024, stages=3, sharded_state="none", recompute=("none",))
    whole = search_plans(context, LONG, replace(constraints, slices=1))
    again = reslice_best(context, LONG, constraints, whole)
    best = again.fitting[0]
    assert best.decisions.slices and best.simulation.fits_in_memory and again.fitting[1:] == whole.fitting
    assert again.simulated > whole.simulated
    made, layout = SequenceSlicer(context.layer_cutter, LONG, constraints), replace(best.decisions, microbatches=2)
    curve = made.time_curve(made.slowest_stage(layout))
    program = best_slicing(LONG.sequence, 3, lambda own, past: curve(own, past) / 3, multiple=1024, sequences=2)
    theirs = replace(layout, schedule="gpipe", slices=program.slices)
    assert len(program.slices) > 2
    assert best.step_s <= evaluate_candidate(context, theirs, context.make_skeleton(LONG, theirs)).step_s
    assert reslice_best(context, LONG, replace(constraints, slices=1), whole) is whole


def test_a_sequence_that_is_too_short_for_its_shards_is_no_fault_of_slices() -> None:
    constraints = Constraints(shards=(5, 1), sharding="megatron-sp")
    with pytest.raises(PlanError, match=r"sequence is shorter than its shards need[\s\S]*where: --seq and shards"):
        check_space(replace(LONG, sequence=2), 5, 8, constraints)
    with pytest.raises(PlanError, match=r"adds? up to the sequence[\s\S]*where: --fix slices"):
        check_space(LONG, 5, 8, Constraints(slices=(1, 2)))
