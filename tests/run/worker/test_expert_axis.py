"""Expert parallelism beside tensor parallelism: loss, every gradient and the parameters are those of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.run.worker.test_exact import check_clipping, check_one_step, check_some_steps
from tests.run.worker.test_state import interrupted, uninterrupted
from tests.support import worker_plans as plans

pytestmark = pytest.mark.gloo


def of(name: str = "mixtral", **decisions: Any) -> plans.PlanCase:
    fixed = {"microbatches": 2, "expert": 2, "shards": (1, 1), "sharding": "megatron-sp"}
    return name, lambda: plans.plan(name, **(fixed | decisions))


TWO = {"replicas": (1, 1)}
CASES: dict[str, plans.PlanCase] = {
    "2 x 2 devices": of(),
    "2 x 2 devices x 2 replicas": of(**TWO),
    "4 x 2 devices": of("eight-experts", expert=4),
    "2 x 4 devices": of("eight-experts", shards=(1, 1, 1, 1)),
    "6 experts: 3 on 2 shards": of("qwen3-moe"),
    "uneven replicas": of(replicas=(3, 1), microbatches=1),
    "1f1b": of(stages=2, microbatches=4),
    "gpipe": of(stages=2, microbatches=4, schedule="gpipe"),
    "zb-v": of(stages=4, placement=(0, 1, 1, 0), microbatches=4, schedule="zb-v"),
    "I and W apart": plans.weights_late(of(stages=2, microbatches=4)),
    "V placement": plans.v_ordered(of(**plans.V_STAGES)),
    "slices": of(stages=2, slices=(4, 4, 4)),
    "parts of sequences": of(context=2),
    "full recomputation": of(stages=2, recompute=("full",)),
    "selective recomputation": of(recompute=("selective",)),
    "zero-1": of(sharded_state="optimizer"),
    "zero-1 x replicas": of(sharded_state="optimizer", **TWO),
    "zero-1 x stages": of(sharded_state="optimizer", stages=2),
    "zero-1 x parts of sequences": of(sharded_state="optimizer", context=2),
    "zero-2 x replicas": of(sharded_state="gradients", **TWO),
    "zero-2 x stages": of(sharded_state="gradients", stages=2),
    "zero-3": of(sharded_state="parameters"),
    "zero-3 x replicas": of(sharded_state="parameters", **TWO),
    "zero-3, I and W apart": plans.weights_late(of(stages=2, microbatches=4, sharded_state="parameters")),
    "tied": of("qwen3-moe", **TWO),
    "tied over 2 stages": of("qwen3-moe", stages=2, microbatches=4),
    "tied over 2 stages, zero-1": of("qwen3-moe", stages=2, sharded_state="optimizer"),
    "tied, zero-3": of("qwen3-moe", sharded_state="parameters", **TWO),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_are_those_of_one_process(gloo_pool, case):
    name, make = CASES[case]
    the_plan = make()
    axes = [axis.name for axis in the_plan.groups[0].axes]
    divided = [parameter for parameter in the_plan.parameters if parameter.stored[axes.index("expert")] == "G0"]
    assert divided and all(len(parameter.shape) == 3 and parameter.stored[-1] == "G0" for parameter in divided)
    check_one_step(gloo_pool, the_plan, name)


AFTER_STEPS = ["uneven replicas", "1f1b", "zero-1 x replicas", "zero-2 x replicas", "zero-3 x replicas", "tied"]


@pytest.mark.parametrize("case", AFTER_STEPS)
def test_parameters_agree_after_some_steps(gloo_pool, case):
    name, make = CASES[case]
    check_some_steps(gloo_pool, make(), name)


@pytest.mark.parametrize("case", ["2 x 2 devices", "zero-1 x replicas", "zero-3 x replicas", "tied over 2 stages"])
def test_clipping_takes_the_same_norm(gloo_pool, case):
    name, make = CASES[case]
    check_clipping(gloo_pool, make(), name)


OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "to one process": ({"sharded_state": "optimizer", "replicas": (1, 1)}, {"expert": 1, "shards": (1,)}),
    "to another size": ({"expert": 4}, {"sharded_state": "parameters", "replicas": (1, 1)}),
    "from experts divided with rows": ({"expert": 1, "shards": (1,) * 4}, {"sharded_state": "gradients", "stages": 2}),
}


@pytest.mark.parametrize("case", OTHER)
def test_a_resume_under_another_plan_agrees(gloo_pool, tmp_path, case):
    name = "eight-experts"

    def make(decisions: dict[str, Any]) -> Any:
        axis = {"expert": 2, "shards": (1, 1), "microbatches": 2} | decisions
        program = "megatron-sp" if axis["expert"] > 1 else "expert" if len(axis["shards"]) > 1 else "none"
        return plans.plan(name, sharding=program, **axis)

    before, after = map(make, OTHER[case])
    resumed = interrupted(gloo_pool, tmp_path, name, before, after)
    straight = uninterrupted(gloo_pool, name, plans.plan(name, microbatches=1))
    np.testing.assert_allclose(resumed["steps"], straight["steps"], rtol=1e-10)
    for parameter, value in straight["parameters"].items():
        error = np.abs(resumed["parameters"][parameter] - value).max()
        assert error <= 1e-10 * np.abs(value).max(), f"{parameter}: {error / np.abs(value).max():.3g}"
