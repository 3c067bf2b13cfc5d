"""The heart: in float64 the loss and every gradient are those of one process, for every layout of up to 8 processes.

The one process is the family's plain modules under PyTorch's own autograd, not our runtime. The bound is 1e-10 of
each tensor's largest entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.plan.check.rules import check_plan
from pipefit.plan.types import Plan

pytestmark = pytest.mark.gloo

plan, with_order, with_groups = plans.plan, plans.with_order, plans.with_groups


def _uneven_stages() -> Plan:
    return with_groups(plan("llama", stages=2, microbatches=2), [((1,), (1,)), ((2, 1, 1), (1,))])


def _uneven_shards() -> Plan:
    cuts = {"cuts": (3,), "microbatches": 2}
    sharded = plan("llama", **cuts, shards=(1, 1), sharding="megatron")
    return with_groups(plan("llama", **cuts), [((1, 1), (1,)), ((1, 1), (1, 1))], sharded)


def _uneven_shards_back() -> Plan:
    cuts = {"cuts": (3,), "microbatches": 2}
    sharded = plan("llama", **cuts, shards=(1, 1), sharding="megatron")
    return with_groups(plan("llama", **cuts), [((1,), (1, 1)), ((1, 1, 1), (1,))], sharded)


def _tied_uneven() -> Plan:
    return with_groups(plan("tied", stages=3, microbatches=2), [((1, 1), (1,)), ((1,), (1,)), ((2, 1, 1), (1,))])


CASES: dict[str, tuple[str, Callable[[], Plan]]] = {
    "one process": ("llama", lambda: plan("llama", microbatches=2)),
    "gpipe 2 stages": ("llama", lambda: plan("llama", stages=2, microbatches=4, schedule="gpipe")),
    "gpipe 4 stages": ("llama", lambda: plan("llama", stages=4, microbatches=4, schedule="gpipe")),
    "1f1b 3 stages": ("llama", lambda: plan("llama", stages=3, microbatches=4)),
    "1f1b 4 stages, 8 microbatches": ("llama", lambda: plan("llama", stages=4, microbatches=8)),
    "2 replicas": ("llama", lambda: plan("llama", microbatches=2, replicas=(1, 1))),
    "4 replicas": ("llama", lambda: plan("llama", microbatches=2, replicas=(1, 1, 1, 1))),
    "uneven replicas": ("llama", lambda: plan("llama", stages=2, microbatches=2, replicas=(2, 1, 1))),
    "2 replicas x 4 stages": ("llama", lambda: plan("llama", stages=4, microbatches=4, replicas=(1, 1))),
    "inner stages": ("llama", lambda: plan("llama", stages=2, microbatches=2, replicas=(1, 1), inner="stage")),
    "megatron": ("llama", lambda: plan("llama", microbatches=2, shards=(1, 1), sharding="megatron")),
    "megatron-sp": ("llama", lambda: plan("llama", microbatches=2, shards=(1, 1), sharding="megatron-sp")),
    "megatron, uneven shards": ("wide", lambda: plan("wide", microbatches=2, shards=(2, 1), sharding="megatron")),
    "megatron x stages x replicas": (
        "llama", lambda: plan("llama", stages=2, microbatches=2, replicas=(1, 1), shards=(1, 1), sharding="megatron"),
    ),
    "megatron-sp x stages x replicas": (
        "llama",
        lambda: plan("llama", stages=2, microbatches=2, replicas=(1, 1), shards=(1, 1), sharding="megatron-sp"),
    ),
    "megatron-sp x 4 stages, zero-1": (
        "llama", lambda: plan("llama", stages=4, microbatches=4, shards=(1, 1), sharding="megatron-sp",
            sharded_state="optimizer"),
    ),
    "megatron-sp, zero-1, uneven replicas": (
        "llama",
        lambda: plan("llama", microbatches=2, replicas=(2, 1, 1), shards=(1, 1), sharding="megatron-sp",
            sharded_state="optimizer"),
    ),
    "searched": ("llama", lambda: plan("llama", microbatches=2, shards=(1, 1), sharding="searched")),
    "searched, 3 uneven shards": (
        "wide", lambda: plan("wide", microbatches=2, shards=(2, 1, 1), sharding="searched"),
    ),
    "searched, uneven shards x stages": (
        "wide", lambda: plan("wide", stages=2, microbatches=2, shards=(2, 1), sharding="searched"),
    ),
    "searched x stages x replicas, tied, zero-1": (
        "tied",
        lambda: plan("tied", stages=2, microbatches=2, replicas=(1, 1), shards=(1, 1), sharding="searched",
            sharded_state="optimizer"),
    ),
    "searched, mixtral, full recomputation": (
        "mixtral", lambda: plan("mixtral", microbatches=2, shards=(1, 1), sharding="searched", recompute=("full",)),
    ),
    "searched, gpt2, uneven shards, I and W apart": (
        "gpt2",
        lambda: plans.zero_bubble_like(
            plan("gpt2", stages=2, microbatches=2, replicas=(1, 1), shards=(2, 1), sharding="searched")
        ),
    ),
    "tied, one stage": ("tied", lambda: plan("tied", microbatches=2, replicas=(1, 1))),
    "tied over 2 stages": ("tied", lambda: plan("tied", stages=2, microbatches=4)),
    "tied over 4 stages x 2 replicas, zero-1": (
        "tied", lambda: plan("tied", stages=4, microbatches=4, replicas=(1, 1), sharded_state="optimizer"),
    ),
    "tied, megatron-sp x 2 stages x 2 replicas": (
        "tied", lambda: plan("tied", stages=2, microbatches=2, replicas=(1, 1), shards=(1, 1), sharding="megatron-sp"),
    ),
    "tied, megatron, zero-1": (
        "tied",
        lambda: plan("tied", stages=2, microbatches=2, replicas=(1, 1), shards=(1, 1), sharding="megatron",
            sharded_state="optimizer"),
    ),
    "tied between unequal grids": ("tied", _tied_uneven),
    "tied, V placement": (
        "tied", lambda: with_order(plan("tied", stages=4, placement=(0, 1, 1, 0), microbatches=2, schedule="gpipe"),
                                   "v", plans.V_LANES),
    ),
    "zero-1": ("llama", lambda: plan("llama", microbatches=2, replicas=(1, 1, 1), sharded_state="optimizer")),
    "zero-1 x stages": ("llama", lambda: plan("llama", stages=2, microbatches=4, replicas=(1, 1),
        sharded_state="optimizer")),
    "selective recomputation": ("llama", lambda: plan("llama", stages=2, microbatches=4, recompute=("selective",))),
    "full recomputation": ("llama", lambda: plan("llama", stages=2, microbatches=4, recompute=("full",))),
    "full recomputation, megatron-sp": (
        "llama",
        lambda: plan("llama", microbatches=2, shards=(1, 1), sharding="megatron-sp", recompute=("full",)),
    ),
    "mixed recomputation x replicas": (
        "llama",
        lambda: plan("llama", stages=3, microbatches=4, replicas=(1, 1), recompute=("full", "none", "selective")),
    ),
    "I and W apart": ("llama", lambda: plans.zero_bubble_like(plan("llama", stages=4, microbatches=8))),
    "I and W apart, tied, zero-1": (
        "tied", lambda: plans.zero_bubble_like(plan("tied", stages=3, microbatches=4, replicas=(1, 1),
            sharded_state="optimizer")),
    ),
    "I and W apart, megatron-sp": (
        "llama",
        lambda: plans.zero_bubble_like(plan("llama", stages=2, microbatches=4, shards=(1, 1), sharding="megatron-sp")),
    ),
    "V placement": (
        "llama", lambda: with_order(plan("llama", stages=4, placement=(0, 1, 1, 0), microbatches=2, schedule="gpipe"),
                                    "v", plans.V_LANES),
    ),
    "V placement x 2 replicas x 2 shards": (
        "llama", lambda: with_order(plan("llama", stages=4, placement=(0, 1, 1, 0), microbatches=2, schedule="gpipe",
                                         replicas=(1, 1), shards=(1, 1), sharding="megatron"), "v", plans.V_LANES),
    ),
    "slices": ("llama", lambda: plan("llama", stages=2, microbatches=2, slices=(5, 4, 3))),
    "slices x replicas, gpipe": (
        "llama", lambda: plan("llama", stages=3, microbatches=2, slices=(6, 6), replicas=(1, 1), schedule="gpipe"),
    ),
    "1 replica to 3 uneven ones": ("llama", _uneven_stages),
    "1 shard to 2": ("llama", _uneven_shards),
    "2 shards to 1": ("llama", _uneven_shards_back),
    "qwen3, tied": ("qwen3", lambda: plan("qwen3", stages=2, microbatches=2, replicas=(1, 1))),
    "mixtral": (
        "mixtral",
        lambda: plans.zero_bubble_like(plan("mixtral", stages=2, microbatches=4, replicas=(1, 1),
            sharded_state="optimizer")),
    ),
    "mixtral, megatron-sp": (
        "mixtral", lambda: plan("mixtral", stages=2, microbatches=2, shards=(1, 1), sharding="megatron-sp"),
    ),
    "qwen3-moe, tied, megatron": (
        "qwen3-moe",
        lambda: plan("qwen3-moe", stages=2, microbatches=2, replicas=(1, 1), shards=(1, 1), sharding="megatron"),
    ),
    "mistral, slices": ("mistral", lambda: plan("mistral", stages=2, microbatches=2, slices=(4, 4, 4))),
    "gpt2, megatron-sp, uneven replicas": (
        "gpt2",
        lambda: plan("gpt2", stages=2, microbatches=2, replicas=(2, 1), shards=(1, 1), sharding="megatron-sp"),
    ),
    "gpt2": ("gpt2", lambda: plan("gpt2", stages=2, microbatches=4, replicas=(1, 1))),
    "gpt2, V placement": (
        "gpt2", lambda: with_order(plan("gpt2", stages=4, placement=(0, 1, 1, 0), microbatches=2, schedule="gpipe"),
                                   "v", plans.V_LANES),
    ),
}  # fmt: skip


@lru_cache
def reference(name: str):
    return plans.reference(name, plans.JOB)


@lru_cache
def one_process(name: str, pool):
    """Three steps by one process: what every layout's parameters must be after three steps."""
    return cases_of(pool, plan(name, microbatches=1), name, 3)


def cases_of(pool, the_plan: Plan, name: str, steps: int, tagged: bool = True):
    pool.run(cases.prepare, [(the_plan, plans.model(name))], tagged, ranks=8)
    arguments = (the_plan, plans.model(name), plans.VOCABULARY, steps, tagged)
    return pool.run(cases.run_steps, *arguments, ranks=len(the_plan.used_devices))[0]


def check_one_step(pool, the_plan: Plan, name: str):
    """Loss, every gradient and the global norm of a plan's step are one process's."""
    check_plan(the_plan)
    loss, gradients = reference(name)
    found = cases_of(pool, the_plan, name, 1)
    assert found["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    assert set(found["gradients"]) == set(gradients)
    norm = sum(float((g**2).sum()) for g in gradients.values()) ** 0.5
    assert found["steps"][0][1] == pytest.approx(norm, rel=1e-11), "the global norm counts a parameter not once"
    for parameter, gradient in gradients.items():
        wanted = gradient.numpy()
        error = np.abs(found["gradients"][parameter] - wanted).max()
        assert error <= 1e-10 * np.abs(wanted).max(), f"{parameter}: {error / np.abs(wanted).max():.3g}"


def check_some_steps(pool, the_plan: Plan, name: str):
    """Losses, norms and parameters of three steps of a plan are one process's."""
    found, wanted = cases_of(pool, the_plan, name, 3), one_process(name, pool)
    np.testing.assert_allclose(found["steps"], wanted["steps"], rtol=1e-10)
    for parameter, value in wanted["parameters"].items():
        error = np.abs(found["parameters"][parameter] - value).max()
        assert error <= 1e-9 * np.abs(value).max(), f"{parameter}: {error}"


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_are_those_of_one_process(gloo_pool, case):
    name, make = CASES[case]
    check_one_step(gloo_pool, make(), name)


AFTER_STEPS = [
    "1f1b 3 stages", "uneven replicas", "megatron-sp, zero-1, uneven replicas", "tied, V placement",
    "tied over 4 stages x 2 replicas, zero-1", "tied, megatron, zero-1", "I and W apart, tied, zero-1",
    "tied between unequal grids", "2 shards to 1",
]  # fmt: skip


@pytest.mark.parametrize("case", AFTER_STEPS)
def test_parameters_agree_after_some_steps(gloo_pool, case):
    name, make = CASES[case]
    check_some_steps(gloo_pool, make(), name)


WITHOUT_TAGS = [
    "1f1b 4 stages, 8 microbatches", "I and W apart", "V placement x 2 replicas x 2 shards",
    "tied over 4 stages x 2 replicas, zero-1", "tied between unequal grids", "slices x replicas, gpipe",
]  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_TAGS)
def test_messages_need_no_tags(gloo_pool, case):
    """NCCL has none: with one communicator per directed pair both ends must agree on the order of messages."""
    name, make = CASES[case]
    found = cases_of(gloo_pool, make(), name, 2, tagged=False)
    wanted = cases_of(gloo_pool, make(), name, 2)
    assert found["steps"] == wanted["steps"]
    for parameter, value in wanted["parameters"].items():
        assert np.array_equal(found["parameters"][parameter], value), parameter


def pytorchs_adamw(name: str, steps: int, max_norm: float):
    """(norms before clipping, parameters) of the plain modules under torch's own clipping and AdamW."""
    import torch

    job, config = plans.JOB, cases.ADAMW_OPTIONS
    layers = plans.plain_layers(name, job)
    named = {layer.parameter_names[k]: v for layer in layers for k, v in layer.named_parameters()}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
    norms = []
    for step in range(steps):
        tokens, labels, divisor = cases.rows_of(plan(name), step, plans.VOCABULARY)
        optimizer.zero_grad()
        (plans.plain_loss(layers, tokens, labels) / divisor).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), max_norm or float("inf"))))
        optimizer.step()
    return norms, {parameter: value.detach().numpy() for parameter, value in named.items()}


def agree(found, wanted) -> None:
    assert set(found) == set(wanted)
    for parameter, value in wanted.items():
        error = np.abs(found[parameter] - value).max()
        assert error <= 1e-9 * np.abs(value).max(), f"{parameter}: {error}"


def test_our_one_process_run_is_pytorchs_adamw(gloo_pool):
    agree(one_process("tied", gloo_pool)["parameters"], pytorchs_adamw("tied", 3, 0.0)[1])


CLIPPED = [
    "one process",
    "megatron, uneven shards",
    "tied over 4 stages x 2 replicas, zero-1",
    "tied, megatron, zero-1",
]


@pytest.mark.parametrize("case", CLIPPED)
def test_clipped_steps_are_pytorchs(gloo_pool, case):
    """Every step is clipped by another factor, which AdamW does not cancel; the gradients kept are the clipped ones."""
    name, make = CASES[case]
    the_plan, bound = make(), 0.05
    optimizer = replace(cases.OPTIMIZER, max_norm=bound)
    gloo_pool.run(cases.prepare, [(the_plan, plans.model(name))], True, ranks=8)
    arguments = (the_plan, plans.model(name), plans.VOCABULARY, 3, True, optimizer)
    found = gloo_pool.run(cases.run_steps, *arguments, ranks=len(the_plan.used_devices))[0]
    norms, wanted = pytorchs_adamw(name, 3, bound)
    assert min(norms) > 4 * bound
    np.testing.assert_allclose([norm for _, norm in found["steps"]], norms, rtol=1e-10)
    agree(found["parameters"], wanted)
    clipped = sum(float((gradient**2).sum()) for gradient in found["gradients"].values()) ** 0.5
    assert clipped == pytest.approx(bound, rel=1e-5)


def check_clipping(pool, the_plan: Plan, name: str):
    """Two clipped steps take the norm, and leave the parameters, of one process."""
    optimizer = replace(cases.OPTIMIZER, max_norm=0.05)
    found, wanted = (
        pool.run(cases.run_steps, one, plans.model(name), plans.VOCABULARY, 2, True, optimizer, ranks=ranks)[0]
        for one, ranks in prepared(pool, name, the_plan, plans.plan(name, microbatches=1))
    )
    assert wanted["steps"][0][1] > 0.1, "nothing is clipped"
    np.testing.assert_allclose(found["steps"], wanted["steps"], rtol=1e-10)
    for parameter, value in wanted["parameters"].items():
        assert np.abs(found["parameters"][parameter] - value).max() <= 1e-9 * np.abs(value).max(), parameter


def prepared(pool, name: str, *some: Plan) -> list[tuple[Plan, int]]:
    """Each plan with its number of ranks, its weights ready in the pool."""
    pool.run(cases.prepare, [(one, plans.model(name)) for one in some], ranks=8)
    return [(one, len(one.used_devices)) for one in some]
