"""Fitted orders in the planner: never slower than the families, within every lane's memory, the same every time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.plan.passes.test_search import little_memory
from tests.support.plan_toys import toy_cluster, toy_model

from benchmarks.plain_devices import plain_spec
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.check.rules import check_plan
from pipefit.plan.evaluate.evaluate import evaluate_candidate
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.explain.result import fitted_order_note
from pipefit.plan.make import make_plan
from pipefit.plan.passes import fitted_orders as fitting
from pipefit.plan.passes.fitted_orders import best_plans, fit_layout, moves_for, tables_of
from pipefit.plan.passes.search import search_plans
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.schedule.families import FAMILIES
from pipefit.schedule.problem import linear_placement, vee_placement

JOB = Job(batch=8, sequence=512)
MID = Job(batch=16, sequence=512, precision="bfloat16")
LONG = Job(batch=16, sequence=4096, precision="bfloat16")


def context(count: int = 6) -> PlannerContext:
    return PlannerContext(toy_model(count), toy_cluster(1, 4))


@pytest.mark.parametrize("placement", [linear_placement(3), vee_placement(3)], ids=["linear", "v"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_fitted_order_is_not_slower_than_any_family_of_its_layout(placement: tuple[int, ...], recompute: str) -> None:
    """The same cuts, microbatches, recomputation: against every family that can be made there."""
    room, compared = context(8), 0
    layout = ParallelConfig(stages=len(placement), placement=placement, microbatches=8, recompute=(recompute,))
    layout = replace(layout, cuts=room.layer_cutter.leanest_cut(LONG, layout).cuts)
    one = fit_layout(room, tables_of(room, LONG, layout, [(recompute,)]))
    assert one is not None and one.simulation.fits_in_memory
    for name in sorted({*FAMILIES} - {"fit"}):
        if FAMILIES[name].placement(3) != placement or FAMILIES[name].least_units(3) > 8:
            continue
        compared += 1
        family = evaluate_candidate(room, replace(layout, schedule=name), room.make_skeleton(LONG, layout))
        assert one.step_s <= family.step_s * (1 + 1e-9), name
    assert compared >= 2


def test_the_plan_is_not_slower_than_the_search_alone_and_fits() -> None:
    gained = 0
    for beyond in (400_000, 3_000_000, 6_000_000):
        room = PlannerContext(toy_model(8), little_memory(4, beyond=beyond))
        families, both = search_plans(room, MID), best_plans(room, MID)
        if not families.fitting:
            continue
        best = both.fitting[0]
        assert best.step_s <= families.fitting[0].step_s and best.simulation.fits_in_memory
        assert (both.fitted > 0) == (best.decisions.schedule == "fit")
        gained += both.fitted
    assert gained, "somewhere an order made for the memory that is left wins"


def test_memory_that_is_left_is_used_stage_by_stage() -> None:
    """Between the memory of no recomputation and that of all, some stages recompute and some do not."""
    room = context(8)
    layout = ParallelConfig(stages=3, microbatches=8, schedule="1f1b", replicas=(1,))
    layout = replace(layout, cuts=room.layer_cutter.leanest_cut(LONG, layout).cuts)
    tables = tables_of(room, LONG, layout, [("none",), ("full",)])
    least = {one.decisions.recompute: fit_layout(room, [one]) for one in tables}
    none, full = least["none",], least["full",]
    assert none is not None and full is not None
    peaks = zip(none.simulation.timeline.peak_bytes, full.simulation.timeline.peak_bytes, strict=True)
    limits = [0.6 * float(high) + 0.4 * float(low) for high, low in peaks]
    one = fit_layout(room, tables, limits)
    assert one is not None
    assert all(peak <= limit for peak, limit in zip(one.simulation.timeline.peak_bytes, limits, strict=True))
    alone = [found.step_s for table in tables if (found := fit_layout(room, [table], limits)) is not None]
    assert none.step_s <= one.step_s <= min(alone) * (1 + 1e-9)


def test_it_is_the_same_plan_every_time_and_reads_back() -> None:
    model, cluster = toy_model(8), little_memory(4, beyond=6_000_000)
    plans = [make_plan(model, cluster, MID, Constraints(schedule="fit", stages=3)) for _ in range(2)]
    assert plans[0].content_hash == plans[1].content_hash
    assert plans[0].order.name == plans[0].decisions["schedule"] == "fit"
    check_plan(plans[0], model, cluster)
    again = simulate_plan(plans[0], model, cluster)
    assert plans[0].prediction is not None
    assert again.timeline.makespan_s == plans[0].prediction.step_s and again.fits_in_memory


def test_a_pinned_fit_is_not_slower_than_the_families() -> None:
    model, cluster = toy_model(6), toy_cluster(1, 3)
    fitted = make_plan(model, cluster, JOB, Constraints(schedule="fit", stages=3))
    for name in ("1f1b", "zb-h1", "gpipe"):
        other = make_plan(model, cluster, JOB, Constraints(schedule=name, stages=3))
        assert fitted.prediction is not None and other.prediction is not None
        assert fitted.prediction.step_s <= other.prediction.step_s * (1 + 1e-9), name


def test_decisions_with_fit_can_be_built() -> None:
    model, cluster = toy_model(6), toy_cluster(1, 3)
    plan = build_plan(
        model, cluster, JOB, ParallelConfig(stages=6, placement=vee_placement(3), microbatches=4, schedule="fit")
    )
    check_plan(plan, model, cluster)
    assert plan.order.name == "fit" and plan.order.placement == vee_placement(3)


def test_how_often_orders_are_fitted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = fitting.fit_layout

    def counted(*given: object, **named: object) -> object:
        calls.append(1)
        return real(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(fitting, "fit_layout", counted)
    best_plans(PlannerContext(toy_model(6), toy_cluster(1, 8)), LONG)
    budget = fitting.FITTING_BUDGET
    assert 0 < len(calls) <= budget.layouts
    assert moves_for(100) == budget.most_moves and moves_for(10**9) == budget.least_moves


def test_other_pins_leave_families_as_they_are() -> None:
    room = context()
    found = best_plans(room, JOB, Constraints(schedule="v-half"))
    assert found.fitted == 0 and {one.decisions.schedule for one in found.fitting} == {"v-half"}


@pytest.mark.slow
def test_a_large_model_gains_where_memory_is_tight() -> None:
    """8B on four 80 GB devices, uncut sequences of 8,192, no ZeRO-2 or 3: an order of its own is faster than
    every family."""
    pytest.importorskip("torch")
    from pipefit.model.registry import open_model

    room = PlannerContext(open_model("llama-3-8b"), plain_spec("4xA100-80"))
    job = Job(batch=32, sequence=8192, precision="bfloat16")
    found = best_plans(room, job, Constraints(slices=1, sharded_state="optimizer"))
    families = [one for one in found.fitting if one.decisions.schedule != "fit"]
    assert found.fitting[0].decisions.schedule == "fit"
    assert found.fitting[0].step_s < families[0].step_s


def test_what_groups_gain_is_not_ascribed_to_the_order() -> None:
    def one(step_s: float, schedule: str, groups: bool) -> SimpleNamespace:
        return SimpleNamespace(
            step_s=step_s, decisions=SimpleNamespace(schedule=schedule, lane_shards=((1, 1),) * groups)
        )

    without = [one(0.9, "fit", False), one(1.0, "1f1b", False)]
    assert fitted_order_note(SimpleNamespace(fitting=without), NO_CONSTRAINTS) == _gained(0.1)
    assert fitted_order_note(SimpleNamespace(fitting=[one(0.5, "fit", True), *without]), NO_CONSTRAINTS) == ""
    assert fitted_order_note(
        SimpleNamespace(fitting=[one(0.5, "fit", True), one(0.625, "1f1b", True), *without]), NO_CONSTRAINTS
    ) == _gained(0.2)


def _gained(share: float) -> str:
    return f"; a fitted order takes {share:.1%} less than the best schedule family"
