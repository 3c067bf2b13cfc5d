"""Every schedule family by its name in the planner: pinned, it is planned on its own placement; unasked, some are."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.errors import ScheduleError
from pipefit.plan.bounds.in_flight import in_flight_bytes, in_flight_peaks
from pipefit.plan.candidates.space import iter_candidates
from pipefit.plan.check.rules import check_plan
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.passes.search import search_plans
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints
from pipefit.plan.types import Job
from pipefit.schedule import FAMILIES, ScheduleProblem

JOB = Job(batch=8, sequence=512)


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"fit"}))
def test_a_pinned_family_is_planned(name: str) -> None:
    model, cluster = toy_model(6), toy_cluster()
    context = PlannerContext(model, cluster)
    found = search_plans(context, JOB, Constraints(schedule=name, devices=2, replicas=(1,), shards=(1,)), top=1)
    best = found.fitting[0].decisions
    assert best.schedule == name and best.lane_of_stage == FAMILIES[name].placement(2)
    assert best.microbatches >= FAMILIES[name].least_units(2)
    plan = build_plan(model, cluster, JOB, best)
    check_plan(plan)
    assert plan.order.name == name and plan.order.placement == FAMILIES[name].placement(2)


def test_too_few_microbatches_are_left_out_or_explained() -> None:
    context = PlannerContext(toy_model(6), toy_cluster())
    constraints = Constraints(schedule="dualpipe-v", devices=2, replicas=(1,), shards=(1,))
    counts = {choice.microbatches for choice in iter_candidates(JOB, 9, 4, 1, constraints)}
    assert counts == {4, 8}
    with pytest.raises(ScheduleError, match=r"(?s)DualPipeV needs two microbatches.*seen: 2 microbatches on 2 lanes"):
        search_plans(context, JOB, replace(constraints, microbatches=2))


@pytest.mark.parametrize(
    "name", sorted(name for name, family in FAMILIES.items() if not (family.fused or family.is_fitted))
)
def test_what_lanes_hold_is_known_from_a_few_microbatches(name: str) -> None:
    """The counts are read off a shortened order: those of the whole one are the same."""
    compared = 0
    for lanes in range(2, 7):
        placement = FAMILIES[name].placement(lanes)
        for microbatches in range(1, 6 * lanes + 2):
            made = in_flight_peaks(FAMILIES[name], placement, microbatches)
            if made is None:
                continue
            compared += 1
            saved = [1.0 + 0.1 * stage for stage in range(len(placement))]
            pending = [0.7 - 0.05 * stage for stage in range(len(placement))]
            for late in ([], pending):
                most = in_flight_bytes(name, placement, microbatches, saved, late)
                left = late or [0.0] * len(placement)
                for lane, actions in enumerate(FAMILIES[name](problem(placement, microbatches)).lanes):
                    change = [
                        ((a.kind == "F") - (a.kind in ("B", "I"))) * saved[a.stage]
                        + ((a.kind == "I") - (a.kind == "W")) * left[a.stage]
                        for a in actions
                    ]
                    assert most[lane] == pytest.approx(max(accumulate(change))), (lanes, microbatches, lane)
    assert compared > 20


def problem(placement: tuple[int, ...], microbatches: int) -> ScheduleProblem:
    return ScheduleProblem(placement=placement, microbatches=microbatches)


def test_what_is_tried_unasked() -> None:
    tried = {choice.schedule for choice in iter_candidates(JOB, 9, 4, 1, NO_CONSTRAINTS)}
    assert tried == {name for name, made in FAMILIES.items() if made.searched}
    sliced = {choice.schedule for choice in iter_candidates(JOB, 9, 4, 1, Constraints(slices=(JOB.sequence - 1, 1)))}
    assert sliced == {name for name, made in FAMILIES.items() if made.searched_with_slices}
    assert sliced == tried | {"eager-1f1b", "svpp"}
    assert {"1f1b", "gpipe", "zb-h1", "zb-v", "v-half", "v-min"} <= tried and not {"1f1b-v", "dualpipe-v"} & tried
