"""HSDP: state sharded over groups of replicas gives the loss, gradients and parameters of one process.

The pieces are summed over the groups once a step, the norm counts each of them once, and a checkpoint of one group size
continues under another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.run.worker.test_exact import check_clipping, check_one_step, check_some_steps, prepared
from tests.run.worker.test_state import interrupted, uninterrupted
from tests.support import sharded_cases
from tests.support import worker_plans as plans

from pipefit.plan.types import Plan

pytestmark = pytest.mark.gloo

STATES = ("optimizer", "gradients", "parameters")
FOUR = {"replicas": (1, 1, 1, 1)}


def of(name: str = "llama", **decisions: Any) -> tuple[str, Callable[[str], Plan]]:
    return name, lambda state: plans.plan(
        name, **({"microbatches": 2, "state_group": 2, "sharded_state": state} | decisions)
    )


def split(name: str = "llama", **decisions: Any) -> tuple[str, Callable[[str], Plan]]:
    """The weight gradients put off to W."""
    _, make = of(name, **decisions)
    return name, lambda state: plans.zero_bubble_like(make(state))


def v_placed(name: str) -> tuple[str, Callable[[str], Plan]]:
    _, make = of(name, stages=4, placement=(0, 1, 1, 0), schedule="gpipe", **FOUR)
    return name, lambda state: plans.with_order(make(state), "v", plans.V_LANES)


CASES: dict[str, tuple[str, Callable[[str], Plan]]] = {
    "4 replicas": of(**FOUR),
    "6 replicas, groups of 3": of(replicas=(1,) * 6, state_group=3, microbatches=1),
    "8 replicas, groups of 4": of(replicas=(1,) * 8, state_group=4, microbatches=1),
    "8 replicas, groups of 2": of(replicas=(1,) * 8, microbatches=1),
    "2 stages": of(stages=2, **FOUR),
    "2 stages, stages inside": of(stages=2, inner="stage", **FOUR),
    "devices in another order": of(devices=(5, 2, 7, 0), **FOUR),
    "megatron-sp": of(sharding="megatron-sp", shards=(1, 1), **FOUR),
    "megatron": of("gpt2", sharding="megatron", shards=(1, 1), **FOUR),
    "searched": of("mixtral", sharding="searched", shards=(1, 1), **FOUR),
    "2 parts of sequences": of(context=2, replicas=(1, 1)),
    "4 parts in 2 groups": of(context=2, microbatches=1, stages=2, replicas=(1, 1)),
    "groups of 4 of 2 x 4 replicas": of(context=2, state_group=4, **FOUR),
    "tied": of("tied", **FOUR),
    "tied over 2 stages": of("tied", stages=2, **FOUR),
    "full recomputation": of(stages=2, recompute=("full",), **FOUR),
    "slices": of(stages=2, slices=(5, 4, 3), **FOUR),
    "V placement": v_placed("llama"),
    "V placement, tied": v_placed("tied"),
    "I and W apart": split(stages=2, **FOUR),
    "I and W apart, tied": split("tied", stages=2, **FOUR),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_are_those_of_one_process(gloo_pool, case, state):
    name, make = CASES[case]
    the_plan = make(state)
    assert all(stage.state_group > 1 for stage in the_plan.stages)
    check_one_step(gloo_pool, the_plan, name)


AFTER_STEPS = ["4 replicas", "2 stages", "megatron-sp", "2 parts of sequences", "tied over 2 stages", "I and W apart"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("case", AFTER_STEPS)
def test_parameters_agree_after_some_steps(gloo_pool, case, state):
    name, make = CASES[case]
    check_some_steps(gloo_pool, make(state), name)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("case", ["4 replicas", "megatron-sp", "tied over 2 stages"])
def test_clipping_takes_the_same_norm(gloo_pool, case, state):
    """The norm counts each piece in one group."""
    name, make = CASES[case]
    check_clipping(gloo_pool, make(state), name)


@pytest.mark.parametrize("sharding", [{}, {"shards": (1, 1), "sharding": "megatron-sp"}])
@pytest.mark.parametrize("state", ("gradients", "parameters"))
def test_a_device_keeps_the_part_of_its_group(gloo_pool, state, sharding):
    the_plan = plans.plan("llama", microbatches=2, state_group=2, sharded_state=state, **FOUR, **sharding)
    ((_, ranks),) = prepared(gloo_pool, "llama", the_plan)
    for found in gloo_pool.run(sharded_cases.kept_bytes, the_plan, plans.model("llama"), plans.VOCABULARY, ranks=ranks):
        sharded = found["sharded"]
        assert sharded["gradients"] * 2 == sharded["elements"]
        assert sharded["parameters"] * (2 if state == "parameters" else 1) == sharded["elements"]
        assert found["stale"] == [] and found["in_flight"] == 0


@pytest.mark.parametrize(
    "case", ["8 replicas, groups of 2", "megatron-sp", "4 parts in 2 groups", "tied over 2 stages"]
)
@pytest.mark.parametrize("state", STATES)
def test_groups_hold_equal_bits(gloo_pool, case, state):
    """Replicated state does not drift apart: what several devices hold is equal to the last bit."""
    name, make = CASES[case]
    the_plan = make(state)
    ((_, ranks),) = prepared(gloo_pool, name, the_plan)
    held: dict[object, list[str]] = {}
    for pieces in gloo_pool.run(sharded_cases.held_pieces, the_plan, plans.model(name), plans.VOCABULARY, ranks=ranks):
        for what, digest in pieces:
            held.setdefault(what, []).append(digest)
    mesh = the_plan.lane_mesh(0)
    groups = mesh.size // mesh.find_axis("shard").size // the_plan.stages[0].state_group
    assert min(map(len, held.values())) >= groups > 1
    assert all(len({*digests}) == 1 for digests in held.values())


@pytest.mark.parametrize("split_weights", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_pieces_are_summed_beside_the_last_backward(gloo_pool, state, split_weights):
    """All but those of the last two buckets or layers; once a step, not in every microbatch."""
    name, make = split(microbatches=2, **FOUR) if split_weights else of(microbatches=2, **FOUR)
    the_plan = make(state)
    ((_, ranks),) = prepared(gloo_pool, name, the_plan)
    arguments = (the_plan, plans.model(name), plans.VOCABULARY)
    model = plans.model(name)
    last = 2 if state == "optimizer" else sum(len(layer.parameters) for layer in model.layers[:2])
    for early, total in gloo_pool.run(sharded_cases.early_sums, *arguments, ranks=ranks):
        assert (early, total) == (len(the_plan.parameters) - last, len(the_plan.parameters))


RESUMES = {
    "all replicas, then groups": ("all", 2),
    "groups, then all replicas": (2, "all"),
    "groups of 4, then of 2": (4, 2),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("case", RESUMES)
def test_a_checkpoint_goes_on_under_another_group_size(gloo_pool, tmp_path, case, state):
    before, after = (
        plans.plan(
            "tied", microbatches=1, replicas=(1,) * 8, sharded_state=state, state_group=0 if size == "all" else size
        )
        for size in RESUMES[case]
    )
    resumed, straight = interrupted(gloo_pool, tmp_path, "tied", before, after), uninterrupted(gloo_pool, "tied", after)
    np.testing.assert_allclose(resumed["steps"], straight["steps"], rtol=1e-10)
    for parameter, value in straight["parameters"].items():
        error = np.abs(resumed["parameters"][parameter] - value).max()
        assert error <= 1e-10 * np.abs(value).max(), f"{parameter}: {error / np.abs(value).max():.3g}"


@pytest.mark.parametrize("state", STATES)
def test_resuming_is_bit_equal(gloo_pool, tmp_path, state):
    name, make = CASES["2 stages"]
    plan = make(state)
    resumed, straight = interrupted(gloo_pool, tmp_path, name, plan, plan), uninterrupted(gloo_pool, name, plan)
    assert resumed["steps"] == straight["steps"]
    for parameter, value in straight["parameters"].items():
        assert np.array_equal(resumed["parameters"][parameter], value), parameter
