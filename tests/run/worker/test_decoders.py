"""Model types of the decoder run exactly on two processes: two steps of each, float64, under stages and shards.

The bound and the reference are those of `test_exact.py`: the family's plain modules under PyTorch's own autograd.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans
from tests.support.decoder_variants import DECODER_VARIANTS

from pipefit.errors import PlanError
from pipefit.plan.check.rules import check_plan

pytestmark = pytest.mark.gloo

LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {"stages": 2, "microbatches": 2},
    "megatron": {"microbatches": 2, "shards": (1, 1), "sharding": "megatron"},
    "megatron-sp": {"microbatches": 2, "shards": (1, 1), "sharding": "megatron-sp", "recompute": ("selective",)},
    "searched": {"microbatches": 2, "shards": (1, 1), "sharding": "searched"},
    "slices": {"stages": 2, "microbatches": 2, "slices": (5, 7)},
    "context": {"microbatches": 2, "context": 2},
}
QUICK = {
    ("gemma", "megatron-sp"), ("olmo2", "megatron"), ("cohere-normed", "megatron-sp"), ("gpt_neox", "stages"),
    ("qwen2_moe", "megatron-sp"), ("opt", "stages"),
}  # fmt: skip


@lru_cache
def reference(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    return plans.reference(name, plans.JOB)


@pytest.mark.parametrize(  # a type meets three layouts, and a layout half of the types
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in QUICK else pytest.mark.slow)
        for number, name in enumerate(DECODER_VARIANTS)
        for place, layout in enumerate(LAYOUTS)
        if (number + place) % 2 == 0 or (name, layout) in QUICK
        if name != "falcon" or "megatron" not in layout  # one head of keys and values is not divided: see below
    ],
)
def test_two_processes_train_as_one_does(gloo_pool: Any, name: str, layout: str) -> None:
    planned = plans.plan(name, **LAYOUTS[layout])
    check_plan(planned)
    model = plans.model(name)
    gloo_pool.run(cases.prepare, [(planned, model)], ranks=gloo_pool.size)
    result = gloo_pool.run(cases.run_steps, planned, model, plans.VOCABULARY, ranks=2)[0]
    loss, gradients = reference(name)
    assert result["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    gradients = {parameter: gradient for parameter, gradient in gradients.items() if gradient is not None}
    assert set(result["gradients"]) == set(gradients)
    for parameter, gradient in gradients.items():
        expected = gradient.numpy()
        error = np.abs(result["gradients"][parameter] - expected).max()
        largest = max(np.abs(expected).max(), 1e-3)  # biases of keys have no gradient where nothing turns keys
        assert error <= 1e-10 * largest, f"{parameter}: {error / largest:.3g}"
    two_steps = gloo_pool.run(cases.run_steps, planned, model, plans.VOCABULARY, 2, ranks=2)[0]["steps"]
    alone = plans.plan(name, microbatches=1)
    gloo_pool.run(cases.prepare, [(alone, model)], ranks=gloo_pool.size)
    expected_steps = gloo_pool.run(cases.run_steps, alone, model, plans.VOCABULARY, 2, ranks=1)[0]["steps"]
    assert two_steps[1][0] == pytest.approx(expected_steps[1][0], rel=1e-9)


def test_one_head_of_keys_is_not_divided_by_heads() -> None:
    with pytest.raises(PlanError, match="too few units for these shares"):
        plans.plan("falcon", **LAYOUTS["megatron"])
