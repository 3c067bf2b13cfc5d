"""What a search reports, and the plan of an interrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.check.rules import check_plan, load_plan, save_plan
from pipefit.plan.evaluate.search_progress import (
    CONTEXTS,
    GROUPS,
    INTERRUPTED,
    LAYOUTS,
    PLACING,
    SENSITIVITY,
    STATE_GROUPS,
    TRADE,
    SearchReport,
)
from pipefit.plan.make import is_interrupted, make_plan
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job, Plan

JOB = Job(batch=8, sequence=64)
PASS_NAMES = [LAYOUTS, CONTEXTS, STATE_GROUPS, PLACING, GROUPS, TRADE, SENSITIVITY]


def plan_toy(
    observer: Callable[[SearchReport], None] | None, *, keep_best: bool = True, fix: Constraints | None = None
) -> Plan:
    constraints = Constraints(sharding="none") if fix is None else fix
    return make_plan(toy_model(4), toy_cluster(2, 2), JOB, constraints, progress=observer, keep_best=keep_best)


def test_every_pass_reports_in_order_and_the_best_step_never_rises() -> None:
    reports: list[SearchReport] = []
    plan = plan_toy(reports.append)
    assert list(dict.fromkeys(report.pass_name for report in reports)) == PASS_NAMES
    steps = [report.best_s for report in reports if report.best_s is not None]
    assert steps == sorted(steps, reverse=True)
    assert [report.simulated for report in reports] == sorted(report.simulated for report in reports)
    assert all(report.bound_s is None or report.bound_s <= steps[-1] for report in reports if report.best_s)
    assert any(report.left for report in reports)
    assert not is_interrupted(plan) and plan == plan_toy(None), "the plan does not depend on the observer"


class InterruptingObserver:
    """Interrupts once: at the n-th report of a pass after a plan fits."""

    def __init__(self, pass_name: str, number: int) -> None:
        self.pass_name, self.left = pass_name, number
        self.best_s = float("inf")

    def __call__(self, report: SearchReport) -> None:
        if self.left > 0 and report.pass_name == self.pass_name and report.best_s is not None:
            self.left -= 1
            if self.left == 0:
                self.best_s = report.best_s
                raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("pass_name", "number"),
    [*((name, 1) for name in PASS_NAMES), (LAYOUTS, 2), (LAYOUTS, 20), (TRADE, 2)],
)
def test_an_interrupted_pass_gives_the_best_plan_so_far(pass_name: str, number: int, tmp_path: Path) -> None:
    observer = InterruptingObserver(pass_name, number)
    plan = plan_toy(observer)
    assert observer.left == 0, "the pass made this many reports"
    assert is_interrupted(plan) and plan.prediction is not None and INTERRUPTED in plan.prediction.assumptions
    assert plan.prediction.step_s <= observer.best_s * (1 + 1e-9)
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    model, cluster = toy_model(4), toy_cluster(2, 2)
    check_plan(loaded, model, cluster)
    assert simulate_plan(loaded, model, cluster).timeline.makespan_s == pytest.approx(plan.prediction.step_s)


def test_an_interrupted_search_obeys_a_fixed_schedule_and_mapping() -> None:
    fixed = Constraints(schedule="fit", stages=2, replicas=(1, 1), mapping=(3, 1, 2, 0))
    observer = InterruptingObserver(LAYOUTS, 1)
    plan = plan_toy(observer, fix=fixed)
    assert is_interrupted(plan) and plan.to_schedule().name == "fit"
    assert plan.groups == plan_toy(None, fix=fixed).groups


def test_an_interrupt_propagates_unless_the_best_plan_is_asked_for() -> None:
    with pytest.raises(KeyboardInterrupt):
        plan_toy(InterruptingObserver(TRADE, 1), keep_best=False)


def test_an_interrupt_before_any_plan_propagates() -> None:
    def interrupt_start(report: SearchReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_toy(interrupt_start)
