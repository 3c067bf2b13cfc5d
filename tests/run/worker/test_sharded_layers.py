"""ZeRO-2 and ZeRO-3: loss and every gradient are those of one process; what a device keeps is its own part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.run.worker.test_exact import check_clipping, check_one_step, check_some_steps, prepared
from tests.support import sharded_cases
from tests.support import worker_cases as cases
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
    check_some_steps(gloo_pool, make(state), name)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("case", ["uneven replicas", "megatron-sp", "tied over 2 stages"])
def test_clipping_takes_the_same_norm(gloo_pool, case, state):
    name, make = CASES[case]
    check_clipping(gloo_pool, make(state), name)


def test_bfloat16_gradients_are_close_to_float32_ones(gloo_pool):
    """Plans with tensor, sequence and data parallelism: the same step, with the rounding of a bfloat16 sum."""
    for decisions in (
        {"stages": 2, "microbatches": 4, "replicas": (1, 1), "sharded_state": "parameters"},
        {"microbatches": 2, "replicas": (1, 1), "shards": (1, 1), "sharding": "megatron-sp"},
        {"stages": 2, "microbatches": 4, "shards": (2, 1), "sharding": "megatron", "schedule": "zb-h1"},
    ):
        precisions = ("bfloat16", "bfloat16-gradients")
        wide, narrow = (plans.plan("tied", replace(plans.JOB, precision=kind), **decisions) for kind in precisions)
        first, second = (
            gloo_pool.run(cases.uninterrupted, one, plans.model("tied"), plans.VOCABULARY, (0, 2), ranks=ranks)[0]
            for one, ranks in prepared(gloo_pool, "tied", wide, narrow)
        )
        assert first["steps"][0][0] == second["steps"][0][0], "the same forward"
        assert first["steps"] != second["steps"], "gradients are rounded"
        np.testing.assert_allclose(second["steps"], first["steps"], rtol=1e-2)


@pytest.mark.parametrize("split_weights", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "tied"])
def test_bfloat16_equals_zero_1(gloo_pool, name, split_weights):
    """Only the order of float32 sums over the microbatches differs."""
    job = replace(plans.JOB, precision="bfloat16")
    shape = {"stages": 2, "microbatches": 4, "replicas": (1, 1)}
    some = [plans.plan(name, job, **shape, sharded_state=state) for state in ("optimizer", *STATES)]
    if split_weights:
        some = [plans.zero_bubble_like(one) for one in some]
    results = [
        gloo_pool.run(cases.uninterrupted, one, plans.model(name), plans.VOCABULARY, (0, 2), ranks=ranks)[0]
        for one, ranks in prepared(gloo_pool, name, *some)
    ]
    for result in results[1:]:
        assert result["steps"][0][0] == results[0]["steps"][0][0]
        np.testing.assert_allclose(result["steps"], results[0]["steps"], rtol=1e-4)
        for parameter, value in results[0]["parameters"].items():
            difference = np.abs(result["parameters"][parameter] - value)
            assert difference.mean() <= 1e-3 * np.abs(value).mean(), parameter


@pytest.mark.parametrize("sharding", [{}, {"shards": (1, 1), "sharding": "megatron-sp"}])
@pytest.mark.parametrize("name", ["llama", "tied"])
@pytest.mark.parametrize("state", STATES)
def test_a_device_keeps_only_its_part(gloo_pool, state, name, sharding):
    """After a step and an evaluation: the storages of parameters and gradients, and what is still in flight."""
    the_plan = plans.plan(name, microbatches=2, replicas=(1, 1), sharded_state=state, **sharding)
    ((_, ranks),) = prepared(gloo_pool, name, the_plan)
    for found in gloo_pool.run(sharded_cases.kept_bytes, the_plan, plans.model(name), plans.VOCABULARY, ranks=ranks):
        sharded = found["sharded"]
        assert sharded["buckets"] > 4 and sharded["layers"] == 1, "a bucket spans two layers"
        assert sharded["gradients"] * 2 == sharded["elements"]
        assert sharded["parameters"] * (2 if state == "parameters" else 1) == sharded["elements"]
        assert found["tied"]["buckets"] == (name == "tied")
        assert found["tied"]["parameters"] == found["tied"]["gradients"] == found["tied"]["elements"]
        assert found["stale"] == [] and found["in_flight"] == 0
        assert found["most_parameters"] <= 2 and found["most_gradients"] <= 2


def test_no_gather_ends_a_step_of_zero_3():
    lanes = {state: plans.plan("llama", microbatches=2, replicas=(1, 1), sharded_state=state) for state in STATES}
    assert "GATHER" in lanes["gradients"].order.lanes[0] and "GATHER" not in lanes["parameters"].order.lanes[0]
