"""Sequences split over devices: loss, every gradient and the updated parameters are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.run.worker.test_exact import check_one_step, check_some_steps
from tests.support import worker_plans as plans

pytestmark = pytest.mark.gloo


def of(name: str = "llama", **decisions: Any) -> plans.PlanCase:
    return name, lambda: plans.plan(name, **({"microbatches": 2, "context": 2} | decisions))


TWO = {"replicas": (1, 1)}
SHARDED = {"shards": (1, 1)}
CASES: dict[str, plans.PlanCase] = {
    "2 parts": of(),
    "3 parts": of(context=3),
    "6 parts, a token a chunk": of(context=6),
    "2 parts x 2 replicas": of(**TWO),
    "2 parts x uneven replicas": of(replicas=(2, 1)),
    "1f1b": of(stages=2, microbatches=4),
    "3 parts, 2 stages": of(context=3, stages=2, microbatches=4),
    "1f1b x replicas": of(stages=2, microbatches=4, **TWO),
    "stages inside": of(stages=2, microbatches=4, inner="stage", **TWO),
    "gpipe, 4 stages": of(stages=4, microbatches=4, schedule="gpipe"),
    "zb-v": of(stages=4, placement=(0, 1, 1, 0), microbatches=4, schedule="zb-v"),
    "zb-h1 x replicas": of(stages=2, microbatches=4, schedule="zb-h1", **TWO),
    "I and W apart": plans.weights_late(of(stages=2, microbatches=4)),
    "I and W apart, gpt2": plans.weights_late(of("gpt2", stages=2, microbatches=4, **TWO)),
    "V placement": plans.v_ordered(of(**plans.V_STAGES)),
    "megatron": of(sharding="megatron", **SHARDED),
    "megatron-sp": of(sharding="megatron-sp", **SHARDED),
    "megatron-sp x stages": of(stages=2, sharding="megatron-sp", **SHARDED),
    "megatron, gpt2 x replicas": of("gpt2", sharding="megatron", **SHARDED, **TWO),
    "zero-1 over the parts": of(sharded_state="optimizer"),
    "zero-1 x stages x replicas": of(stages=2, sharded_state="optimizer", **TWO),
    "zero-1, megatron-sp": of(sharded_state="optimizer", sharding="megatron-sp", **SHARDED),
    "zero-2 x replicas": of(sharded_state="gradients", **TWO),
    "zero-3 x stages": of(stages=2, sharded_state="parameters"),
    "zero-3, I and W apart": plans.weights_late(of(stages=2, sharded_state="parameters")),
    "tied over 2 stages": of("tied", stages=2, microbatches=4),
    "full recomputation": of(stages=2, recompute=("full",)),
    "selective recomputation": of(recompute=("selective",)),
    "sliding window": of("mistral"),
    "3 parts, sliding window": of("mistral", context=3, stages=2),
    "experts": of("mixtral", **TWO),
    "qwen3": of("qwen3", context=3),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_are_those_of_one_process(gloo_pool, case):
    name, make = CASES[case]
    the_plan = make()
    assert all(group.to_mesh().find_axis("context").size > 1 for group in the_plan.groups)
    check_one_step(gloo_pool, the_plan, name)


AFTER_STEPS = [
    "3 parts", "1f1b x replicas", "I and W apart", "megatron-sp", "zero-1 x stages x replicas", "zero-3 x stages",
]  # fmt: skip


@pytest.mark.parametrize("case", AFTER_STEPS)
def test_parameters_agree_after_some_steps(gloo_pool, case):
    name, make = CASES[case]
    check_some_steps(gloo_pool, make(), name)
