"""The scale of the loss against PyTorch's GradScaler, and steps under a scale against steps without one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.errors import RunError
from pipefit.model.graph import Model
from pipefit.plan.types import Plan
from pipefit.run.update.loss_scale import LEAST_SCALE, LossScale
from pipefit.run.worker.worker import Worker


@pytest.mark.parametrize("seed", range(4))
def test_the_scale_is_that_of_gradscaler(seed: int) -> None:
    """Over steps of which every fifth has a gradient that is not finite."""
    draw = random.Random(seed)
    scale = LossScale(growth_steps=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale.scale, growth_interval=3)
    value = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([value], lr=0.1)
    for _ in range(60):
        finite = draw.random() > 0.2
        value.grad = torch.tensor([1.0 if finite else draw.choice([float("inf"), float("nan")])])
        scaler.scale(torch.ones(()))  # GradScaler makes its state with the first loss
        scaler.step(optimizer)
        scaler.update()
        scale.update_scale(finite)
        assert scale.scale == scaler.get_scale()


def test_scales_that_do_not_help_stop_the_run() -> None:
    scale = LossScale(scale=LEAST_SCALE)
    with pytest.raises(RunError, match="not finite under any scale"):
        scale.update_scale(False)


def test_a_state_is_restored() -> None:
    scale, other = LossScale(growth_steps=5), LossScale(growth_steps=5)
    for finite in (True, False, True, True):
        scale.update_scale(finite)
    other.restore(scale.to_mapping())
    assert other == scale and scale.finite_steps == 2


def same_parameters(first: Worker, second: Worker) -> bool:
    """Whether two workers of this rank hold the same numbers."""
    pairs = zip(first.buckets, second.buckets, strict=True)
    return all(torch.equal(one.parameters, two.parameters) for one, two in pairs)


def steps_under_a_scale(plan: Plan, model: Model, vocabulary: int, max_norm: float) -> tuple[bool, float]:
    """(whether losses, norms and parameters are those without a scale, the last scale) of five steps of this rank."""
    optimizer = replace(cases.OPTIMIZER, max_norm=max_norm)
    plain, scaled = (cases.build(plan, model, optimizer) for _ in range(2))
    scaled.loss_scale, scaled.skips_infinite = LossScale(scale=2.0**12, growth_steps=2), True
    results = [cases.train(worker, plan, vocabulary, range(5)) for worker in (plain, scaled)]
    return results[0] == results[1] and same_parameters(plain, scaled), scaled.loss_scale.scale


def skipped_step(plan: Plan, model: Model, vocabulary: int) -> list[bool]:
    """Facts of a worker whose first step is not finite."""
    worker, fresh = (cases.build(plan, model) for _ in range(2))
    worker.skips_infinite = fresh.skips_infinite = True
    weights, worker.loss_weights = worker.loss_weights, dict.fromkeys(worker.loss_weights, float("inf"))
    cases.train(worker, plan, vocabulary, range(1))
    facts = [worker.skipped_steps == 1, same_parameters(worker, fresh)]
    worker.loss_weights, fresh.skipped_steps = weights, 1
    results = [cases.train(one, plan, vocabulary, range(1, 3)) for one in (worker, fresh)]
    return [*facts, results[0] == results[1], same_parameters(worker, fresh)]


LAYOUT = {"stages": 2, "microbatches": 2, "replicas": (1, 1), "sharded_state": "optimizer"}


def prepared_plan(pool: Any) -> Plan:
    """A plan whose groups all processes of the pool have made, as later tests need it."""
    plan = plans.plan("llama", **LAYOUT)
    pool.run(cases.prepare, [(plan, plans.model("llama"))], ranks=pool.size)
    return plan


@pytest.mark.gloo
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_scale_changes_no_step(gloo_pool: Any, max_norm: float) -> None:
    """A power of two changes exponents alone, so float64 steps under it are those without it, to the last bit."""
    plan = prepared_plan(gloo_pool)
    ranks = gloo_pool.run(steps_under_a_scale, plan, plans.model("llama"), plans.VOCABULARY, max_norm, ranks=4)
    assert ranks == [(True, 2.0**14)] * 4, "doubled twice"


@pytest.mark.gloo
def test_a_step_that_is_not_finite_changes_nothing(gloo_pool: Any) -> None:
    """The worker goes on as if the step had not been."""
    plan = prepared_plan(gloo_pool)
    assert gloo_pool.run(skipped_step, plan, plans.model("llama"), plans.VOCABULARY, ranks=4) == [[True] * 4] * 4
