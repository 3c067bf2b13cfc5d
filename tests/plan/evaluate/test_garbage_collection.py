"""Planning puts the cycle collector off, and leaves it as it was."""

from __future__ import annotations

import gc

import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.errors import PlanError
from pipefit.plan import make
from pipefit.plan.evaluate.garbage_collection import defer_collection
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.types import Job


def test_nothing_is_collected_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    search = make.best_plans

    def watched(*arguments: object) -> object:
        seen.append(gc.isenabled())
        return search(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(make, "best_plans", watched)
    job = Job(batch=4, sequence=64)
    make.make_plan(toy_model(2), toy_cluster(1, 1), job)
    assert seen == [False] and gc.isenabled()
    with pytest.raises(PlanError):
        make.make_plan(toy_model(2), toy_cluster(1, 1), job, Constraints(stages=40))
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with defer_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
