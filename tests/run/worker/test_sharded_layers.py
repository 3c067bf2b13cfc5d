"""ZeRO-2 and ZeRO-3: loss and every gradient are those of one process; what a device keeps is its own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.run.worker.test_exact import cases_of, check_one_step, one_process
from tests.support import worker_plans as plans

from pipefit.plan.types import Plan

pytestmark = pytest.mark.gloo

STATES = ("gradients", "parameters")


def of(name: str = "llama", **decisions: Any) -> tuple[str, Callable[[str], Plan]]:
    return name, lambda state: plans.plan(name, **({"microbatches": 2, "sharded_state": state} | decisions))


def split(name: str = "llama", **decisions: Any) -> tuple[str, Callable[[str], Plan]]:
    """The weight gradients put off to W."""
    _, make = of(name, **decisions)
    return name, lambda state: plans.zero_bubble_like(make(state))


def v_placed(state: str) -> Plan:
    decisions = {"stages": 4, "placement": (0, 1, 1, 0), "schedule": "gpipe", "replicas": (1, 1)}
    return plans.with_order(of(**decisions)[1](state), "v", plans.V_LANES)


TWO = {"replicas": (1, 1)}
SHARDED = {"shards": (1, 1), "replicas": (1, 1)}
CASES: dict[str, tuple[str, Callable[[str], Plan]]] = {
    "2 replicas": of(**TWO),
    "4 replicas": of(replicas=(1, 1, 1, 1)),
    "uneven replicas": of(replicas=(2, 1, 1)),
    "one layer a stage": of("gpt2", stages=4, microbatches=4, **TWO),
    "1f1b": of(stages=2, microbatches=4, **TWO),
    "gpipe, 3 stages": of(stages=3, microbatches=4, schedule="gpipe", **TWO),
    "slices": of(stages=2, slices=(5, 4, 3), **TWO),
    "full recomputation": of(stages=2, recompute=("full",), **TWO),
    "full recomputation, slices": of(slices=(6, 6), recompute=("full",), **TWO),
    "selective recomputation": of(recompute=("selective",), **TWO),
    "mixed recomputation": of(stages=3, microbatches=4, recompute=("full", "none", "selective"), **TWO),
    "megatron-sp": of(sharding="megatron-sp", **SHARDED),
    "megatron x stages": of(stages=2, sharding="megatron", **SHARDED),
    "megatron-sp, uneven replicas": of(replicas=(2, 1, 1), shards=(1, 1), sharding="megatron-sp"),
    "searched": of("mixtral", sharding="searched", **SHARDED),
    "tied": of("tied", **TWO),
    "tied over 2 stages": of("tied", stages=2, microbatches=4, **TWO),
    "tied, megatron-sp x 2 stages": of("tied", stages=2, sharding="megatron-sp", **SHARDED),
    "gpt2, uneven replicas x stages": of("gpt2", stages=2, microbatches=4, replicas=(2, 1)),
    "qwen3-moe": of("qwen3-moe", **TWO),
    "mixtral, I and W apart": split("mixtral", stages=2, microbatches=4, **TWO),
    "I and W apart": split(stages=2, microbatches=4, **TWO),
    "I and W apart, tied, 3 stages": split("tied", stages=3, microbatches=4, **TWO),
    "I and W apart, gpt2, full recomputation": split("gpt2", stages=2, microbatches=4, recompute=("full",), **TWO),
    "V placement": ("llama", v_placed),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_are_those_of_one_process(gloo_pool, case, state):
    name, make = CASES[case]
    the_plan = make(state)
    forms = {form for parameter in the_plan.parameters for form in parameter.state}
    assert f"Gflat:{state}" in forms
    check_one_step(gloo_pool, the_plan, name)


AFTER_STEPS = [
    "4 replicas", "uneven replicas", "1f1b", "slices", "megatron-sp", "tied over 2 stages",
    "I and W apart, tied, 3 stages", "full recomputation",
]  # fmt: skip


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("case", AFTER_STEPS)
def test_parameters_agree_after_some_steps(gloo_pool, case, state):
    name, make = CASES[case]
    found, wanted = cases_of(gloo_pool, make(state), name, 3), one_process(name, gloo_pool)
    np.testing.assert_allclose(found["steps"], wanted["steps"], rtol=1e-10)
    for parameter, value in wanted["parameters"].items():
        error = np.abs(found["parameters"][parameter] - value).max()
        assert error <= 1e-9 * np.abs(value).max(), f"{parameter}: {error}"
