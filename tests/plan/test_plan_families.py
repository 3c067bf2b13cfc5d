"""Every schedule family by its name in the planner: pinned, it is planned on its own placement; unasked, some are."""

from __future__ import annotations

import pytest
from plan_toys import toy_cluster, toy_model

from pipefit.errors import ScheduleError
from pipefit.plan.build import Workbench, build_plan
from pipefit.plan.check import check_plan
from pipefit.plan.search import search
from pipefit.plan.space import space
from pipefit.plan.types import Job
from pipefit.schedule import FAMILIES

JOB = Job(batch=8, sequence=512)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_pinned_family_is_planned(name: str) -> None:
    model, cluster = toy_model(6), toy_cluster()
    bench = Workbench(model, cluster)
    found = search(bench, JOB, {"schedule": name, "devices": 2, "replicas": (1,)}, top=1)
    best = found.fitting[0].decisions
    assert best.schedule == name and best.lane_of_stage == FAMILIES[name].placement(2)
    assert best.microbatches >= FAMILIES[name].least_units(2)
    plan = build_plan(model, cluster, JOB, best)
    check_plan(plan)
    assert plan.order.name == name and plan.order.placement == FAMILIES[name].placement(2)


def test_too_few_microbatches_are_left_out_or_explained() -> None:
    bench = Workbench(toy_model(6), toy_cluster())
    pins = {"schedule": "dualpipe-v", "devices": 2, "replicas": (1,)}
    counts = {choice.microbatches for choice in space(JOB, 9, 4, 1, pins)}
    assert counts == {4, 8}
    with pytest.raises(ScheduleError, match=r"(?s)DualPipeV needs two microbatches.*seen: 2 microbatches on 2 lanes"):
        search(bench, JOB, pins | {"microbatches": 2})


def test_what_is_tried_unasked() -> None:
    tried = {choice.schedule for choice in space(JOB, 9, 4, 1, {})}
    assert tried == {name for name, made in FAMILIES.items() if made.searched}
    assert {"1f1b", "gpipe"} <= tried and not {"v-half", "zb-h1"} & tried
