"""The number type of products that a plan asks PyTorch for, and a run in TF32 on devices without its units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.plan.types import Plan
from pipefit.run.stage.products import use_product_type


@pytest.fixture(autouse=True)
def kept_setting() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def test_only_tf32_lets_products_round() -> None:
    for name in ("tf32", "float32", "tf32", "bfloat16"):
        use_product_type(name, torch.device("cpu"))
        wanted = name == "tf32"
        assert torch.backends.cuda.matmul.allow_tf32 is wanted and torch.backends.cudnn.allow_tf32 is wanted


@pytest.mark.gloo
def test_processors_compute_tf32_as_float32(gloo_pool) -> None:
    """The losses of two steps are those of float32, bit by bit; the workers ask for TF32, and then no longer."""
    float32 = plans.plan("llama", replace(plans.JOB, precision="float32"), stages=2, microbatches=2)
    tf32 = replace(float32, job=replace(float32.job, precision="tf32"))
    results, settings = [], []
    for plan in (tf32, float32):
        results.append(trained(gloo_pool, plan))
        settings.append(gloo_pool.run(torch.get_float32_matmul_precision, ranks=2))
    assert results[0]["steps"] == results[1]["steps"]
    assert settings == [["high", "high"], ["highest", "highest"]]


def trained(gloo_pool, plan: Plan):
    gloo_pool.run(cases.prepare, [(plan, plans.model("llama"))], ranks=gloo_pool.size)
    return gloo_pool.run(cases.uninterrupted, plan, plans.model("llama"), plans.VOCABULARY, (0, 2), ranks=2)[0]
