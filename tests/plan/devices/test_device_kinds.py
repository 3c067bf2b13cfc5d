"""Clusters of several kinds of devices: the search against trying every assignment, cut and share, and the cases in
which a kind is worth leaving out, uneven rows beat uneven layers, and the reverse."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.support.plan_toys import toy_model

from pipefit.cluster.kinds import data_sheet_kind
from pipefit.cluster.spec import uniform_rail
from pipefit.cluster.types import Cluster, DeviceKind, Host, Provenance
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.errors import DoesNotFitError
from pipefit.plan.candidates.grid_bounds import LowerBounds
from pipefit.plan.candidates.queue import build_queues
from pipefit.plan.candidates.space import iter_grids
from pipefit.plan.devices.device_kinds import (
    DeviceKinds,
    assign_devices,
    device_patterns,
    divide_proportionally,
    fastest_rows,
    neighbour_patterns,
    row_shares,
)
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.make import make_plan
from pipefit.plan.passes.search import search_plans
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan, PlanPrediction

JOB = Job(batch=8, sequence=2048, precision="bfloat16")
FIXED = Constraints(schedule="1f1b", recompute=("none",), sharded_state="none")


def kind(name: str, times: float = 1.0, memory_bytes: int | None = None) -> DeviceKind:
    """A device `times` as fast as another, so slow that a toy's compute outweighs links and overheads."""
    base, _ = data_sheet_kind("A100-80")
    times /= 1000
    return replace(
        base,
        name=name,
        memory_bytes=memory_bytes or base.memory_bytes,
        peak_flops_per_s={dtype: times * peak for dtype, peak in base.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=times * base.memory_bandwidth_bytes_per_s,
        overhead_s=0.0,
    )


def cluster(*hosts: tuple[DeviceKind, int], bandwidth: float = 25e9) -> Cluster:
    """One host for every (kind, devices)."""
    _, link = data_sheet_kind("A100-80")
    rails = (uniform_rail("network", len(hosts), 1e-6, bandwidth),) if len(hosts) > 1 else ()
    return Cluster(
        name="mixed",
        kinds={each.name: each for each, _ in hosts},
        links={"inside": link},
        hosts=tuple(
            Host(name=f"h{n}", kind=each.name, devices=count, link="inside") for n, (each, count) in enumerate(hosts)
        ),
        rails=rails,
        provenance=Provenance(source="assumed"),
    )


FAST, SLOW = kind("fast", 2.5), kind("slow")


def every_way(context: PlannerContext, job: Job, microbatches: tuple[int, ...]) -> Iterator[ParallelConfig]:
    """Every assignment of kinds to the places of every grid, every cut, every division of the rows."""
    layers, fleet = len(context.only_module.layers), context.layer_cutter.fleet
    count = context.network.devices
    for lanes, replicas, m in itertools.product(range(1, count + 1), range(1, count + 1), microbatches):
        rows = job.batch // m
        if lanes * replicas > count or replicas > rows or lanes > layers:
            continue
        shares = [
            tuple(b - a for a, b in itertools.pairwise((0, *stops, rows)))
            for stops in itertools.combinations(range(1, rows), replicas - 1)
        ]
        for cells in itertools.product(range(len(fleet.names)), repeat=lanes * replicas):
            if any(cells.count(place) > len(each) for place, each in enumerate(fleet.devices)):
                continue
            pattern = tuple(cells[lane * replicas : (lane + 1) * replicas] for lane in range(lanes))
            devices = assign_devices(pattern, "replica", fleet.devices, 1)
            for cuts in itertools.combinations(range(1, layers), lanes - 1):
                for each in shares:
                    yield ParallelConfig(stages=lanes, cuts=cuts, replicas=each, microbatches=m, devices=devices)


def best_of_all(context: PlannerContext, job: Job, microbatches: tuple[int, ...]) -> EvaluatedPlan:
    every = (
        evaluate_candidate(context, one, context.make_skeleton(job, one))
        for one in every_way(context, job, microbatches)
    )
    return min((one for one in every if one.simulation.fits_in_memory), key=lambda one: one.step_s)


CLUSTERS = {
    "two and one": cluster((FAST, 2), (SLOW, 1)),
    "one and two": cluster((FAST, 1), (SLOW, 2)),
    "much slower": cluster((FAST, 2), (kind("crawling", 0.05), 1)),
    "slow link": cluster((FAST, 1), (SLOW, 2), bandwidth=2e7),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_search_finds_the_best_assignment_cut_and_shares(name: str) -> None:
    """Against every way at all, on three devices."""
    context, job = PlannerContext(toy_model(4), CLUSTERS[name]), replace(JOB, batch=4)
    best = best_of_all(context, job, (1, 4))
    found = search_plans(context, job, FIXED).fitting[0]
    assert found.step_s <= best.step_s * (1 + 1e-9)


def kinds_of(context: PlannerContext, decisions: ParallelConfig) -> set[str]:
    return {context.network.kinds[device].name for lane in decisions.lane_devices() for device in lane}


@pytest.mark.parametrize(("slowdown", "kinds"), [(2.0, {"fast", "other"}), (50.0, {"fast"})])
def test_a_kind_is_used_where_it_helps_and_left_out_where_it_does_not(slowdown: float, kinds: set[str]) -> None:
    context = PlannerContext(toy_model(6), cluster((FAST, 2), (kind("other", 2.5 / slowdown), 2)))
    best = search_plans(context, JOB, FIXED).fitting[0]
    assert kinds_of(context, best.decisions) == kinds
    alone = search_plans(PlannerContext(toy_model(6), cluster((FAST, 2))), JOB, FIXED).fitting[0]
    assert best.step_s <= alone.step_s * (1 + 1e-9), "more devices never make the plan slower"
    assert (best.step_s < 0.95 * alone.step_s) == (len(kinds) > 1)


def test_uneven_rows_win_where_layers_are_few_and_uneven_layers_where_rows_are() -> None:
    """Three layers cannot be divided 3:1, and 8 rows can; 16 blocks can be, and a single row cannot."""
    both = cluster((kind("fast", 3.0), 1), (kind("slow", 1.0), 1), bandwidth=25e9)
    few = search_plans(PlannerContext(toy_model(1), both), JOB, FIXED).fitting[0]
    assert few.decisions.lane_count == 1 and sorted(few.decisions.replicas) == [1, 3]
    many = search_plans(
        PlannerContext(toy_model(16), both), replace(JOB, batch=8), replace(FIXED, microbatches=8)
    ).fitting[0]
    assert many.decisions.lane_count == 2 and len(many.decisions.replicas) == 1
    layers = np.diff((0, *many.decisions.cuts, 19))
    assert max(layers) >= 2 * min(layers)


def test_rows_are_in_proportion_to_speed_and_the_plan_says_so() -> None:
    both = cluster((kind("fast", 3.0), 1), (kind("slow", 1.0), 1))
    plan = make_plan(toy_model(1), both, JOB, FIXED)
    assert {plan.decisions["replicas"]} <= {"3:1", "1:3"}
    shares = plan.groups[0].axes[0].shares
    fast = plan.groups[0].devices.index(0)
    assert shares[fast] == 3 * shares[1 - fast]


def test_memory_poor_devices_hold_fewer_layers_than_their_speed_asks_for() -> None:
    model = toy_model(12)
    rich = cluster((kind("rich"), 1), (kind("poor"), 1))
    alone = prediction(make_plan(model, rich, JOB, replace(FIXED, stages=2)))
    need = max(lane.peak_bytes for lane in alone.lanes)
    poor = kind("poor", memory_bytes=WORKSPACE_BYTES + int(0.6 * (need - WORKSPACE_BYTES)))
    plan = make_plan(model, cluster((kind("rich"), 1), (poor, 1)), JOB, replace(FIXED, stages=2, replicas=(1,)))
    layers = {plan.groups[stage.group].devices[0]: stage.layers[1] - stage.layers[0] for stage in plan.stages}
    assert layers[1] < layers[0], "device 1 is the poor one"
    assert all(lane.peak_bytes <= lane.limit_bytes for lane in prediction(plan).lanes)


def prediction(plan: Plan) -> PlanPrediction:
    assert plan.prediction is not None
    return plan.prediction


@pytest.mark.parametrize(("beside", "has"), [(1000, "1000 B"), (-1000, "nothing")])
def test_devices_with_less_memory_than_a_layer_needs_are_left_out(beside: int, has: str) -> None:
    tiny = kind("tiny", memory_bytes=WORKSPACE_BYTES + beside)
    plan = make_plan(toy_model(3), cluster((FAST, 2), (tiny, 2)), JOB)
    assert {*plan.used_devices} <= {0, 1}
    notes = [note for note in prediction(plan).assumptions if "left out" in note]
    assert len(notes) == 1 and notes[0].startswith(
        f"tiny is left out: besides the 64.0 MiB for libraries it has {has}, but"
    )
    assert "but layer layers.0 needs" in notes[0]
    with pytest.raises(DoesNotFitError, match="are missing on each device of lane"):
        make_plan(toy_model(3), cluster((tiny, 2)), JOB)


def test_a_kind_that_is_left_out_is_told() -> None:
    plan = make_plan(toy_model(3), cluster((FAST, 2), (kind("crawling", 0.01), 2)), JOB)
    notes = [note for note in prediction(plan).assumptions if "left out" in note]
    assert len(notes) == 1 and notes[0].startswith("crawling is left out")
    both = make_plan(toy_model(6), cluster((FAST, 2), (SLOW, 2)), JOB)
    assert not any("left out" in note for note in prediction(both).assumptions)


def test_shares_of_rows_are_the_best_of_all() -> None:
    """Against every division of the rows, for times with an overhead and with a jump."""
    times = {
        0: lambda rows: 1.0 + 2.0 * rows,
        1: lambda rows: 0.5 + 5.0 * rows,
        2: lambda rows: 3.0 * rows + 4.0 * (rows > 2),
    }
    for columns in itertools.product(((0,), (1,), (2,), (0, 1)), repeat=3):
        for rows in range(3, 12):

            def slowest(given: tuple[int, ...], columns: tuple[tuple[int, ...], ...] = columns) -> float:
                return max(times[kind](own) for column, own in zip(columns, given, strict=True) for kind in column)

            every = [
                tuple(b - a for a, b in itertools.pairwise((0, *stops, rows)))
                for stops in itertools.combinations(range(1, rows), 2)
            ]
            given = fastest_rows(columns, rows, lambda kind, own: times[kind](own))
            assert sum(given) == rows and min(given) >= 1
            assert slowest(given) == min(map(slowest, every)), (columns, rows, given)
    assert row_shares([(0,), (1,)], 1, lambda kind, own: 1.0) == []


def test_patterns_use_no_more_devices_than_there_are_and_cover_all_kinds() -> None:
    kinds = DeviceKinds(counts=(8, 16, 4), fastest=(2, 0, 1), largest=(0, 1, 2))
    for lanes, replicas in ((3, 2), (4, 4), (7, 4), (2, 8), (1, 28), (12, 2)):
        found = list(device_patterns(lanes, replicas, kinds))
        assert len(found) == len({*found}) or (lanes, replicas) == (1, 28)
        for pattern in found:
            cells = [*itertools.chain(*pattern)]
            assert len(pattern) == lanes and all(len(line) == replicas for line in pattern)
            assert all(cells.count(place) <= kinds.counts[place] for place in range(3))
            devices = assign_devices(pattern, "stage", (range(8), range(8, 24), range(24, 28)), 1)
            assert len({*devices}) == len(cells)
        assert {place for pattern in found for line in pattern for place in line} == {0, 1, 2}
    for other in neighbour_patterns(((0, 0), (1, 1), (1, 1)), (4, 8, 2)):
        assert other != ((0, 0), (1, 1), (1, 1)) and len(other) == 3
    assert divide_proportionally([4, 2, 1], 7) == [4, 2, 1] and sum(divide_proportionally([5, 5, 5], 7)) == 7


def test_floors_are_below_every_cut() -> None:
    """The bound before any cut, for lanes and replicas of several kinds, against all cuts of the cost rows."""
    context = PlannerContext(toy_model(3), cluster((FAST, 2), (kind("odd", 1.0), 2)))
    floors = LowerBounds(context.layer_cutter, JOB)
    seen = 0
    for grid in iter_grids(JOB, 6, 4, 2, replace(FIXED, microbatches=2, slices=1), context.layer_cutter):
        floor = floors.bound_grid(grid)
        for index in range(len(grid.counts)):
            decisions = grid.decisions_at(int(np.ravel_multi_index((index, 0, 0, 0), grid.grid_shape)))
            rows = context.layer_cutter.stage_rows(JOB, decisions)
            times = [row.forward_s + row.backward_s for row in rows]
            slowest = min(
                max(times[stage][a:b].sum() for stage, (a, b) in enumerate(itertools.pairwise((0, *cuts, 6))))
                for cuts in itertools.combinations(range(1, 6), len(rows) - 1)
            )
            assert max(floor.lane_s[0, index, 0], floor.stack.largest_s[index, 0]) <= slowest * (1 + 1e-9)
            seen += len({*map(id, rows)}) > 1
    assert seen > 3, "lanes of several kinds must be among them"


def test_panels_that_are_worked_out_together_get_what_they_get_alone() -> None:
    """Bounds and guesses of all grids, those with slices among them, and the order of a queue that is opened late."""
    context = PlannerContext(toy_model(3), cluster((FAST, 2), (kind("odd", 1.0), 2)))
    floors = LowerBounds(context.layer_cutter, JOB)
    every = list(iter_grids(JOB, 6, 4, 2, Constraints(sharded_state="none"), context.layer_cutter))
    together = {place: (floor, at) for places, floor in floors.bound_batches(every) for at, place in enumerate(places)}
    assert sorted(together) == list(range(len(every)))
    assert max(len(floor.grids) for floor, _ in together.values()) > 1 and any(grid.slices for grid in every)
    for place, (grid, queue) in enumerate(zip(every, build_queues(floors, every), strict=True)):
        floor, at = together[place]
        alone = floors.bound_grid(grid)
        assert floor.grids[at] is grid
        assert floors.bound_s(floor)[at] == pytest.approx(floors.bound_s(alone)[0], rel=1e-12)
        assert floors.guesses_s(floor)[at] == pytest.approx(floors.guesses_s(alone)[0], rel=1e-12)
        keys, least_s = [queue.key_s], queue.bound_s
        while queue.take_next() and not queue.is_empty:
            keys.append(queue.key_s)
            assert queue.bound_s >= least_s
        assert keys == sorted(keys) and len(keys) == np.prod(grid.grid_shape)


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(shards=(1, 1), sharding="megatron-sp"),
        Constraints(replicas=(2, 1), stages=1),
        Constraints(recompute=("full", "none")),
        Constraints(recompute=("selective", "selective", "none", "none"), schedule="zb-v"),
        Constraints(replicas=(1, 1), devices=4),
        Constraints(mapping="hostname"),
    ],
    ids=lambda constraints: str(constraints.to_mapping()),
)
def test_constraints_are_obeyed_on_several_kinds(constraints: Constraints) -> None:
    context = PlannerContext(toy_model(4), cluster((FAST, 2), (SLOW, 2)))
    all_fixed = constraints.with_defaults(schedule="1f1b", sharded_state="none")
    found = search_plans(context, replace(JOB, batch=12), all_fixed).fitting[0].decisions
    for key, value in constraints.to_mapping().items():
        if key == "mapping":
            assert found.devices == ()
        elif key == "devices":
            assert found.device_count == value
        elif key == "stages":
            assert found.stage_count == value
        else:
            assert getattr(found, key) == value
    if constraints.replicas == (2, 1):
        kinds = [context.network.kinds[device].name for device in found.lane_devices()[0]]
        assert kinds[0] == "fast", "the larger share is the faster device's"
