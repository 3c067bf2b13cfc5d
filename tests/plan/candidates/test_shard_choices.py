"""The shard axis of the search: its sizes and programs, equal costs of groups inside hosts, and free against fixed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster
from pipefit.errors import DoesNotFitError, PlanError
from pipefit.plan.candidates.grid_bounds import LowerBounds
from pipefit.plan.candidates.queue import FULL
from pipefit.plan.candidates.shard_choices import recipe_sets, shard_choices, shard_sizes
from pipefit.plan.candidates.space import iter_base_grids, iter_candidates, unsliced_grid
from pipefit.plan.devices.fleet import DeviceFleet
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.make import make_plan
from pipefit.plan.passes.search import LayoutSearch, SearchCandidate, search_plans
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.types import Job

JOB = Job(batch=8, sequence=512)


def unlike_hosts() -> Cluster:
    """Two hosts of four A100 and one host of two L4."""
    cluster, other = plain_spec("3x4xA100-80:100Gbit/s"), plain_spec("2xL4")
    small = replace(other.hosts[0], name="small", link="small")
    return replace(
        cluster,
        kinds={**cluster.kinds, **other.kinds},
        links={**cluster.links, "small": other.links["inside"]},
        hosts=(*cluster.hosts[:2], small),
    )


@pytest.mark.parametrize(
    ("cluster", "sizes"),
    [
        (toy_cluster(1, 4), [2, 4]),
        (toy_cluster(2, 6), [2, 3, 6]),
        (toy_cluster(1, 1), []),
        (unlike_hosts(), [2]),
    ],
)
def test_sizes_divide_the_devices_of_every_host(cluster: Cluster, sizes: list[int]) -> None:
    cutter = PlannerContext(toy_model(2), cluster).layer_cutter
    assert shard_sizes(NO_CONSTRAINTS, cutter) == sizes
    assert shard_sizes(Constraints(mapping=(0, 1)), cutter) == []
    assert shard_sizes(Constraints(sharding="none"), cutter) == []


def test_choices_are_the_programs_that_can_be_written() -> None:
    cutter = PlannerContext(toy_model(2), toy_cluster(1, 4)).layer_cutter
    choices = list(shard_choices(JOB, NO_CONSTRAINTS, cutter))
    assert {(len(choice.shares), choice.sharding) for choice in choices} == {
        (1, "none"),
        *((size, sharding) for size in (2, 4) for sharding in ("megatron", "megatron-sp", "searched")),
    }
    searched = [choice for choice in choices if choice.sharding == "searched"]
    assert len({(choice.shares, choice.recipes) for choice in searched}) == len(searched)
    assert {choice.recipes[0] for choice in searched if len(choice.shares) == 2} == {
        *recipe_sets(JOB, NO_CONSTRAINTS, cutter, 2)
    }
    short = list(shard_choices(replace(JOB, sequence=2), NO_CONSTRAINTS, cutter))
    assert not any(len(choice.shares) == 4 and choice.sharding == "megatron-sp" for choice in short)
    only = list(shard_choices(JOB, Constraints(sharding="none"), cutter))
    assert [(choice.shares, choice.sharding) for choice in only] == [((1,), "none")]


@pytest.mark.parametrize("cluster", [toy_cluster(3, 4), unlike_hosts()], ids=["equal", "unlike"])
def test_groups_in_hosts_cost_what_their_own_devices_cost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of sampled groups against rows of the very devices, bit by bit."""
    constraints = Constraints(shards=(1, 1), stages=2, microbatches=2, recompute=("none",), schedule="1f1b")
    model, count = toy_model(3), 10
    sampled, exact = PlannerContext(model, cluster), PlannerContext(model, cluster)
    candidates = list(iter_candidates(JOB, 6, count, len(cluster.hosts), constraints, sampled.layer_cutter))
    assert len(candidates) > 4
    for decisions in candidates:
        rows = sampled.layer_cutter.stage_rows(JOB, decisions)
        with monkeypatch.context() as patch:
            patch.setattr(DeviceFleet, "has_host_groups", lambda fleet, decisions: False)
            own_rows = exact.layer_cutter.stage_rows(JOB, decisions)
        for row, own_row in zip(rows, own_rows, strict=True):
            for name in ("forward_s", "backward_s", "saved_bytes", "static_bytes"):
                assert np.array_equal(getattr(row, name), getattr(own_row, name)), (decisions, name)
            assert row.limit_bytes == own_row.limit_bytes


def test_the_memory_bound_rules_out_only_what_no_cut_holds() -> None:
    """Every candidate that it rules out, against its exact leanest cut; and it rules out most of what does not fit."""
    cluster = toy_cluster(1, 4)
    kinds = {name: replace(kind, memory_bytes=68_000_000) for name, kind in cluster.kinds.items()}
    context = PlannerContext(toy_model(4, tied=True), replace(cluster, kinds=kinds))
    cutter, floors = context.layer_cutter, LowerBounds(context.layer_cutter, JOB)
    ruled_out, unfit = 0, 0
    for base in iter_base_grids(JOB, 7, 4, 1, NO_CONSTRAINTS, cutter):
        grid = unsliced_grid(base, NO_CONSTRAINTS)
        if grid is None:
            continue
        needs = floors.memory_need(floors.bound_grid(grid))
        assert needs is not None
        for schedule, name in enumerate(grid.names):
            for cell in np.ndindex(grid.grid_shape):
                decisions = replace(grid.decisions_at(int(np.ravel_multi_index(cell, grid.grid_shape))), schedule=name)
                if grid.unit_counts[cell[0]] < grid.least[schedule]:
                    continue
                need = np.broadcast_to(needs[0, schedule], grid.grid_shape[:3])[cell[:3]]
                cut = cutter.cut_layers(JOB, decisions)
                fits = cut is not None and cut.may_fit
                assert not (fits and need > FULL), decisions
                unfit += not fits
                ruled_out += need > FULL
    assert ruled_out > 100 and ruled_out > 0.5 * unfit


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "v-half", "zb-v"])
def test_the_first_microbatches_predict_the_step(schedule: str) -> None:
    context = PlannerContext(toy_model(6), toy_cluster(1, 2))
    job = Job(batch=64, sequence=4096)
    constraints = Constraints(schedule=schedule, microbatches=64, devices=2, replicas=(1,), shards=(1,))
    searcher = LayoutSearch(context, job, constraints, 1)
    decisions = next(iter_candidates(job, 9, 2, 1, constraints, context.layer_cutter))
    candidate, bound_s = SearchCandidate(decisions), 0.0
    while not candidate.is_estimated:
        raised = searcher.raise_level(candidate, bound_s)
        assert raised is not None
        bound_s = raised
    exact = evaluate_candidate(context, candidate.decisions, context.make_skeleton(job, candidate.decisions))
    assert candidate.guess_s == pytest.approx(exact.step_s, rel=searcher.budget.estimate_margin)
    assert searcher.simulated == 0, "a part of a candidate is no plan"
    assert context.tracker.best is exact


PINS = (
    Constraints(shards=(1, 1), sharding="megatron"),
    Constraints(shards=(1, 1), sharding="megatron-sp", stages=2),
    Constraints(shards=(1, 1, 1, 1), sharding="searched"),
    Constraints(replicas=(1, 1), schedule="1f1b"),
    Constraints(recompute=("full",), stages=4),
)


@pytest.mark.parametrize("memory_bytes", [10**9, 67_600_000], ids=["ample", "scarce"])
def test_no_fixed_choice_beats_the_free_plan(memory_bytes: int) -> None:
    cluster = toy_cluster(1, 4)
    cluster = replace(
        cluster, kinds={name: replace(kind, memory_bytes=memory_bytes) for name, kind in cluster.kinds.items()}
    )
    free = make_plan(toy_model(4), cluster, JOB)
    assert free.prediction is not None
    compared = 0
    for pins in PINS:
        try:
            plan = make_plan(toy_model(4), cluster, JOB, pins)
        except (DoesNotFitError, PlanError):
            continue
        compared += 1
        assert plan.prediction is not None
        assert free.prediction.step_s <= plan.prediction.step_s * 1.005, pins
    assert compared >= 3


def test_the_free_search_splits_layers_where_that_is_fastest() -> None:
    """One row of many tokens: neither replicas nor microbatches divide it."""
    context = PlannerContext(toy_model(3), toy_cluster(1, 4))
    best = search_plans(context, Job(batch=1, sequence=65536), NO_CONSTRAINTS).fitting[0]
    alone = search_plans(context, Job(batch=1, sequence=65536), Constraints(shards=(1,), slices=1)).fitting[0]
    assert len(best.decisions.shards) > 1 and best.step_s < 0.9 * alone.step_s
