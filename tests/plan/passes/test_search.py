"""The search against looking at everything: the same winner, and bounds that never exceed what is simulated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import sub

import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.cluster import Cluster, load_cluster
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.errors import DoesNotFitError, PlanError, ScheduleError
from pipefit.model.registry import open_model
from pipefit.optimizers.sharded_state import STATES
from pipefit.plan.bounds.step_bounds import table_bound_s
from pipefit.plan.candidates.closest_misfit import least_missing_bytes
from pipefit.plan.candidates.grid import CandidateGrid, broadcast_cells
from pipefit.plan.candidates.queue import SearchCandidate
from pipefit.plan.candidates.space import iter_candidates, iter_grids
from pipefit.plan.evaluate.evaluate import evaluate_candidate, simulate_candidate
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.evaluate.simplicity import TOLERANCE
from pipefit.plan.make import make_plan
from pipefit.plan.passes.feasibility import some_plan_fits
from pipefit.plan.passes.search import LayoutSearch, search_plans
from pipefit.plan.passes.search_budget import SearchBudget
from pipefit.plan.passes.search_space import list_base_grids
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.units import format_bytes

JOB = Job(batch=8, sequence=512)


def slow_links() -> Cluster:
    return plain_spec("2x2xA100-80:10MB/s")


def little_memory(count: int = 4, beyond: int = 600_000) -> Cluster:
    """Devices with the workspace and `beyond` bytes more."""
    cluster = toy_cluster(1, count)
    kinds = {name: replace(kind, memory_bytes=WORKSPACE_BYTES + beyond) for name, kind in cluster.kinds.items()}
    return replace(cluster, kinds=kinds)


def mixed() -> Cluster:
    """Two fast devices and two slow ones."""
    fast, slow = plain_spec("2xH100"), plain_spec("2xL4")
    both = plain_spec("2x2xH100:10GB/s")
    hosts = (both.hosts[0], replace(both.hosts[1], kind="L4", link="slow"))
    links = {"inside": fast.links["inside"], "slow": slow.links["inside"]}
    return replace(both, kinds={**fast.kinds, **slow.kinds}, links=links, hosts=hosts)


NARROW = Constraints(recompute=("none",), sharded_state="none", inner="replica", sharding="none")
"""Enough of the space of a mixed cluster to try everything."""

CLUSTERS = {"uniform": toy_cluster, "slow links": slow_links, "little memory": little_memory, "mixed": mixed}


def everything(context: PlannerContext, job: Job, constraints: Constraints) -> list[EvaluatedPlan]:
    """Every plan of the space, simulated."""
    found = []
    count, layers, hosts = context.network.devices, len(context.only_module.layers), len(context.cluster.hosts)
    for decisions in iter_candidates(job, layers, count, hosts, constraints, context.layer_cutter):
        found.append(evaluate_candidate(context, decisions, context.make_skeleton(job, decisions)))
    return found


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("job", [JOB, Job(batch=6, sequence=4096, precision="bfloat16")], ids=["float32", "bfloat16"])
def test_the_search_finds_what_trying_everything_finds(name: str, job: Job) -> None:
    context, constraints = (
        PlannerContext(toy_model(3, tied=True), CLUSTERS[name]()),
        NARROW if name == "mixed" else NO_CONSTRAINTS,
    )
    every = everything(context, job, constraints)
    found = search_plans(context, job, constraints, top=3)
    assert found.considered == len(every)
    unlike = {replace(one.decisions, stages=one.decisions.stage_count): one for one in reversed(every)}
    fitting = [one for one in unlike.values() if one.simulation.fits_in_memory]
    if not fitting:
        assert not found.fitting
        return
    best = min(fitting, key=lambda one: one.rank_key)
    assert found.fitting[0].rank_key == best.rank_key
    assert found.fitting[0].decisions == best.decisions
    assert found.lower_bound_s <= best.step_s
    times = sorted(one.step_s for one in fitting)
    exact = 2 if name == "mixed" else 3  # loose bounds: more runners-up than the budget simulates
    assert [one.step_s for one in found.fitting[:exact]] == pytest.approx(times[:exact]), "the runners-up, too"
    assert found.simulated < found.considered / 3, "bounds spare most of the simulations"


def even_bounds(searcher: LayoutSearch, space: Iterable[CandidateGrid]) -> Iterator[tuple[ParallelConfig, float]]:
    """Every candidate with the bound that it has before any cut."""
    for grid in space:
        bounds = broadcast_cells(searcher.floors.bound_s(searcher.floors.bound_grid(grid))[0], grid)
        for index, bound_s in enumerate(bounds.tolist()):
            yield from ((decisions, bound_s) for decisions in grid.decisions_by_schedule(index))


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_bound_exceeds_the_simulated_time(name: str) -> None:
    """Of every candidate at every level of looking."""
    context = PlannerContext(toy_model(3), CLUSTERS[name]())
    searcher = LayoutSearch(context, JOB, NO_CONSTRAINTS, 1)
    constraints = NARROW if name == "mixed" else NO_CONSTRAINTS
    for decisions, even_s in even_bounds(
        searcher, iter_grids(JOB, 6, 4, len(context.cluster.hosts), constraints, context.layer_cutter)
    ):
        candidate = SearchCandidate(decisions)
        bounds = [even_s]
        while len(bounds) < 3 and (bound := searcher.raise_level(candidate, bounds[-1])) is not None:
            bounds.append(bound)
        chosen = candidate.decisions if len(bounds) == 3 else decisions
        if len(bounds) < 3:
            chosen = replace(decisions, cuts=context.layer_cutter.leanest_cut(JOB, decisions).cuts)
        simulated = evaluate_candidate(context, chosen, context.make_skeleton(JOB, chosen)).step_s
        for bound in bounds:
            assert bound <= simulated * (1 + 1e-9), (chosen, bounds, simulated)


@pytest.mark.parametrize("name", CLUSTERS)
def test_memory_rules_out_only_what_does_not_fit(name: str) -> None:
    """A candidate that no cut is said to fit is over the limit when simulated, under every single cut."""
    import itertools

    context = PlannerContext(
        toy_model(2, tied=True), little_memory(beyond=120_000) if name == "uniform" else CLUSTERS[name]()
    )
    ruled_out = 0
    for decisions in iter_candidates(JOB, 5, 3, 1, Constraints(inner="replica")):
        if context.layer_cutter.cut_layers(JOB, decisions) is not None:
            continue
        ruled_out += 1
        for cuts in itertools.combinations(range(1, 5), decisions.stage_count - 1):
            chosen = replace(decisions, cuts=cuts)
            assert not evaluate_candidate(
                context, chosen, context.make_skeleton(JOB, chosen)
            ).simulation.fits_in_memory, chosen
    if name in ("uniform", "little memory"):
        assert ruled_out > 10, "this test must see some that do not fit"


def test_bounds_of_v_placements_and_slices_hold() -> None:
    context = PlannerContext(toy_model(5), toy_cluster(1, 2))
    for constraints in (
        Constraints(placement=(0, 1, 1, 0), schedule="gpipe"),
        Constraints(slices=(300, 212), schedule="gpipe"),
    ):
        for decisions in iter_candidates(JOB, 8, 2, 1, constraints):
            parts = context.make_skeleton(JOB, decisions)
            costs = context.build_cost_table(parts)
            bound = table_bound_s(costs, parts.placement, decisions.microbatches, decisions.schedule)
            assert bound <= evaluate_candidate(context, decisions, parts).step_s * (1 + 1e-9)


def test_leaving_slow_devices_idle_is_a_choice() -> None:
    """With links this slow, one device alone beats any plan that talks."""
    cluster = plain_spec("4x1xA100-80:1MB/s")
    plan = make_plan(toy_model(3), cluster, JOB)
    assert len(plan.used_devices) == 1
    assert "devices" not in plan.decisions and plan.decisions["replicas"] == plan.decisions["stages"] == "1"


def test_constraints_are_obeyed_and_the_rest_is_searched() -> None:
    model, cluster = toy_model(3), toy_cluster()
    plan = make_plan(model, cluster, JOB, Constraints(stages=2, schedule="gpipe", recompute=("full",)))
    assert (plan.decisions["stages"], plan.decisions["schedule"], plan.decisions["recompute"]) == ("2", "gpipe", "full")
    free = make_plan(model, cluster, JOB)
    assert free.prediction is not None and plan.prediction is not None
    assert free.prediction.step_s <= plan.prediction.step_s


def test_a_tensor_parallel_plan_can_be_pinned() -> None:
    plan = make_plan(toy_model(3), toy_cluster(), JOB, Constraints(shards=(1, 1), sharding="megatron-sp", stages=2))
    assert {stage.sharding for stage in plan.stages} == {"megatron-sp"}
    assert all(group.axes[1].shares == (1, 1) for group in plan.groups)
    assert plan.edges[0].forward.sent == ("G0", "G1")


def test_the_prediction_lists_runners_up_with_reasons() -> None:
    plan = make_plan(toy_model(3), toy_cluster(), JOB, top=4)
    assert plan.prediction is not None and len(plan.alternatives) >= 3
    steps = [one.step_s for one in plan.alternatives[:3]]
    assert steps == sorted(steps) and steps[0] >= plan.prediction.step_s
    assert all("slower: " in one.reason or "as fast" in one.reason for one in plan.alternatives[:3])
    assert plan.prediction.lower_bound_s <= plan.prediction.step_s
    assert "compute of stage" in plan.prediction.binds
    assert any("candidates" in note for note in plan.prediction.assumptions)


def test_what_memory_rules_out_is_told() -> None:
    plan = make_plan(toy_model(3), little_memory(), JOB)
    assert plan.prediction is not None
    misfits = [one for one in plan.alternatives if one.peak_bytes > one.limit_bytes]
    assert misfits and all("does not fit: lane" in one.reason for one in misfits)
    assert all(one.step_s < plan.prediction.step_s for one in misfits), "only what would have been faster is told"
    assert "memory rules out" in plan.prediction.binds
    assert all(lane.peak_bytes <= lane.limit_bytes for lane in plan.prediction.lanes)


def test_a_model_that_fits_nowhere_says_what_is_missing_and_what_would_fit() -> None:
    with pytest.raises(DoesNotFitError) as error:
        make_plan(toy_model(6), little_memory(1, beyond=45_000), Job(batch=8, sequence=4))
    text = str(error.value)
    assert "are missing on each device of lane 0" in text and "lane 0 is device 0 (A100-80)" in text
    assert "try: use 2 times as many devices like these" in text
    grown = make_plan(toy_model(6), little_memory(2, beyond=45_000), Job(batch=8, sequence=4))
    assert len(grown.used_devices) > 1, "and with them a plan fits"


@pytest.mark.parametrize("name", ["uniform", "mixed"])
@pytest.mark.parametrize(
    "constraints",
    [NO_CONSTRAINTS, Constraints(cuts=(1, 4)), Constraints(recompute=("full", "none"))],
    ids=["free", "cuts", "recompute"],
)
def test_the_plan_that_comes_closest_is_the_closest_of_all(name: str, constraints: Constraints) -> None:
    """Against the leanest cut of every candidate of the space."""
    cluster = toy_cluster(1, 8) if name == "uniform" else mixed()
    kinds = {key: replace(kind, memory_bytes=WORKSPACE_BYTES + 1_000) for key, kind in cluster.kinds.items()}
    constraints = constraints.with_defaults(**NARROW.to_mapping()) if name == "mixed" else constraints
    context, job = PlannerContext(toy_model(6), replace(cluster, kinds=kinds)), Job(batch=16, sequence=512)
    every = [
        context.layer_cutter.leanest_cut(job, decisions)
        for decisions in iter_candidates(
            job, 9, context.network.devices, len(cluster.hosts), constraints, context.layer_cutter
        )
    ]
    missing = [max(map(sub, cut.floor_bytes, cut.limit_bytes)) for cut in every]
    found = search_plans(context, job, constraints)
    assert not found.fitting and found.unfit == len(every) > 10 and len({*missing}) > 3
    assert min(one.peak_bytes - one.limit_bytes for one in found.misfits) == min(missing) > 0
    bounds = [
        least_missing_bytes(context.layer_cutter, job, one)
        for one in iter_candidates(
            job, 9, context.network.devices, len(cluster.hosts), constraints, context.layer_cutter
        )
    ]
    assert all(bound <= exact for bound, exact in zip(bounds, missing, strict=True))
    with pytest.raises(DoesNotFitError, match=re.escape(f"{format_bytes(min(missing))} are missing")):
        make_plan(context.model, context.cluster, job, constraints)


def test_whether_anything_fits_is_what_the_whole_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the memory at which the first plan fits, and with less looking."""
    job, answers = Job(batch=8, sequence=32), []
    for beyond in range(10_000, 60_000, 2_500):
        context = PlannerContext(toy_model(3), little_memory(3, beyond=beyond))
        answers.append(some_plan_fits(context, job, NO_CONSTRAINTS))
        assert answers[-1] == bool(search_plans(context, job, top=1).fitting), beyond
    assert {*answers} == {False, True}
    simulations = 0

    def counted(*given: object) -> object:
        nonlocal simulations
        simulations += 1
        return simulate_candidate(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("pipefit.plan.passes.search.simulate_candidate", counted)
    assert some_plan_fits(PlannerContext(toy_model(3), toy_cluster()), job, NO_CONSTRAINTS) and simulations == 1


def test_the_suggested_change_really_fits() -> None:
    job = Job(batch=2, sequence=4096)
    cluster = little_memory(1, beyond=1_500_000)
    with pytest.raises(DoesNotFitError, match=r"use --(batch 1|seq 2048|seq 1024)") as error:
        make_plan(toy_model(1), cluster, job, Constraints(devices=1))
    text = str(error.value)
    changed = replace(job, batch=1) if "--batch 1" in text else replace(job, sequence=int(text.rsplit(" ", 1)[1]))
    assert make_plan(toy_model(1), cluster, changed, Constraints(devices=1)).prediction is not None


def test_a_pin_that_keeps_all_plans_from_fitting_is_named() -> None:
    pins = Constraints(stages=1, shards=(1,), groups=False, sharded_state="optimizer")
    with pytest.raises(DoesNotFitError, match="drop --fix stages: without it a plan fits"):
        make_plan(toy_model(4), little_memory(4, beyond=370_000), JOB, pins)


def test_narrower_gradients_are_suggested_where_they_help() -> None:
    """A 1B on one device: 18 bytes a parameter are too many, 16 fit."""
    pytest.importorskip("torch")
    model, cluster, job = open_model("llama-3.2-1b"), plain_spec("1xH100"), Job(batch=1, sequence=128)
    little = {name: replace(kind, memory_bytes=21_500_000_000) for name, kind in cluster.kinds.items()}
    cluster, wide = replace(cluster, kinds=little), replace(job, precision="bfloat16")
    with pytest.raises(DoesNotFitError, match="use --precision bfloat16-gradients"):
        make_plan(model, cluster, wide)
    assert make_plan(model, cluster, replace(job, precision="bfloat16-gradients")).prediction is not None


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        (Constraints(microbatches=3), "cannot be cut into this many equal microbatches"),
        (Constraints(replicas=(1,) * 3, stages=2), "need more devices than the cluster has"),
        (Constraints(schedule="1f1b", stages=4, cuts=(1, 2, 3), replicas=(1, 1)), "need more devices"),
        (Constraints(replicas=(1,) * 4, microbatches=4), "fewer rows than there are replicas"),
        (Constraints(devices=3, replicas=(1, 1)), "No plan obeys all these fixes"),
    ],
)
def test_constraints_that_leave_nothing_say_why(constraints: Constraints, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make_plan(toy_model(3), toy_cluster(), JOB, constraints)


def test_more_stages_than_layers_is_told() -> None:
    with pytest.raises(PlanError, match="more stages than layers"):
        make_plan(toy_model(1), toy_cluster(1, 8), JOB, Constraints(stages=7))


def test_a_batch_that_nothing_divides_still_gets_a_plan() -> None:
    plan = make_plan(toy_model(3), toy_cluster(), Job(batch=7, sequence=64))
    assert plan.order.microbatches in (1, 7)


def test_mixed_devices_load_from_the_example() -> None:
    cluster = load_cluster(__file__.rsplit("/tests/", 1)[0] + "/examples/clusters/mixed-kinds.json")
    plan, single = (make_plan(toy_model(3), cluster, JOB, Constraints(devices=devices)) for devices in (None, 1))
    assert plan.prediction is not None and max(plan.used_devices) < 24
    assert single.prediction is not None and plan.prediction.step_s <= single.prediction.step_s * (1 + TOLERANCE)


@pytest.mark.parametrize(("name", "states"), [("uniform", {*STATES}), ("mixed", {"none", "optimizer"})])
def test_zero_2_and_3_are_searched_on_equal_devices(name: str, states: set[str]) -> None:
    context = PlannerContext(toy_model(3), CLUSTERS[name]())
    for fixed, listed in ((NO_CONSTRAINTS, states), (Constraints(sharded_state="parameters"), {"parameters"})):
        grids = list_base_grids(context, JOB, fixed)
        assert {state for grid in grids for state in grid.sharded_state} == listed


def test_a_spent_budget_is_told_and_a_plan_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a schedule whose bounds are loose, so that the first plan simulated is not the best."""
    model, job, constraints = (
        toy_model(8),
        Job(batch=16, sequence=4096),
        Constraints(schedule="zb-h1", stages=3, groups=False),
    )
    proven = make_plan(model, toy_cluster(), job, constraints)
    budget = SearchBudget(order_actions=0, first_fit_actions=0)
    monkeypatch.setattr("pipefit.plan.passes.search.SEARCH_BUDGET", budget)
    hasty = make_plan(model, toy_cluster(), job, constraints)
    assert hasty.prediction is not None and proven.prediction is not None
    assert "no candidate left has a lower bound below" in proven.prediction.assumptions[-1]
    assert "the search budget was used up" in hasty.prediction.assumptions[-1]
    assert hasty.prediction.step_s > proven.prediction.step_s


def test_an_estimated_candidate_is_simulated_although_the_budget_is_spent() -> None:
    """A pinned pipeline whose estimate alone takes the budget is a plan, not a misfit."""
    constraints = Constraints(
        schedule="1f1b", stages=3, replicas=(1,), microbatches=64, recompute=("none",), sharded_state="none", slices=1
    )
    context, job = PlannerContext(toy_model(8), toy_cluster(1, 3)), Job(batch=64, sequence=64)
    budget = SearchBudget(order_actions=0, infeasible_actions=40, first_fit_actions=0)
    found = search_plans(context, job, constraints, budget=budget)
    assert found.fitting
    assert found.fitting[0].step_s == search_plans(context, job, constraints).fitting[0].step_s


def test_the_search_goes_on_after_a_late_first_fit() -> None:
    """The first plan that fits is seldom the best: the search continues although its budget is spent."""
    constraints, job = Constraints(schedule="zb-h1", stages=3, groups=False), Job(batch=16, sequence=4096)
    context = PlannerContext(toy_model(8), toy_cluster())
    best = search_plans(context, job, constraints).fitting[0]
    hasty = SearchBudget(order_actions=0, first_fit_actions=0, alternative_simulations=0)
    patient = SearchBudget(order_actions=0, alternative_simulations=0)
    first = search_plans(context, job, constraints, budget=hasty).fitting[0]
    assert search_plans(context, job, constraints, budget=patient).fitting[0].step_s == best.step_s < first.step_s


def test_a_schedule_that_no_candidate_can_have_says_why() -> None:
    with pytest.raises(ScheduleError, match="1F1B is written for one stage per lane"):
        make_plan(toy_model(3), toy_cluster(1, 2), JOB, Constraints(placement=(0, 1, 1, 0), schedule="1f1b"))


def test_a_candidate_that_lacks_a_little_is_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the closed form does not see, the search leaves room for: plans that its first cuts do not allow."""
    constraints, gained = Constraints(schedule="1f1b", stages=3, recompute=("none",), microbatches=8, replicas=(1,)), 0
    model, job = toy_model(8), Job(batch=8, sequence=512)
    for beyond in range(900_000, 1_900_000, 50_000):
        cluster = little_memory(3, beyond=beyond)
        again = search_plans(PlannerContext(model, cluster), job, constraints, top=1).fitting
        with monkeypatch.context() as patch:
            patch.setattr("pipefit.plan.passes.search.SEARCH_BUDGET", SearchBudget(leaner_cuts=0))
            once = search_plans(PlannerContext(model, cluster), job, constraints, top=1).fitting
        assert len(again) >= len(once), beyond
        assert all(one.simulation.fits_in_memory for one in again)
        gained += len(again) - len(once)
    assert gained >= 1


@pytest.mark.parametrize("budget", [100, -1])
def test_a_search_that_finds_nothing_ends_and_says_so(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work is bounded by PATIENCE where no plan stops it; without it, everything is looked at and told so."""
    cluster, job = little_memory(4, beyond=-10_000_000), Job(batch=16, sequence=512)
    room, constraints = PlannerContext(toy_model(8), cluster), Constraints(schedule="1f1b")
    every = search_plans(room, job, constraints)
    monkeypatch.setattr("pipefit.plan.passes.search.SEARCH_BUDGET", SearchBudget(infeasible_actions=budget))
    some = search_plans(room, job, constraints)
    assert not some.fitting and some.unfit < every.unfit
    assert some.open_bound_s < float("inf") == every.open_bound_s
    with pytest.raises(DoesNotFitError, match="No plan that fits was found before the search's budget was spent"):
        make_plan(toy_model(8), cluster, job, constraints)
