"""Whole models of users in pipelines: training is that of the user's own module under PyTorch, whatever the layout.

Losses of three steps and all parameters afterwards are compared with one process of plain PyTorch (the unmodified
module, its own loss, torch.optim.AdamW), in float64; rows and labels come from a data set that every rank reads itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import whole_cases
from tests.support import worker_cases as cases
from tests.support.whole_models import HAP, OTHERS, TOKENS

from pipefit.plan.types import Plan

pytestmark = pytest.mark.gloo

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 stages x 2 replicas": {"stages": 2, "replicas": (1, 1), "microbatches": 2},
    "4 stages, I and W apart": {"stages": 4, "microbatches": 4, "schedule": "zb-h1"},
    "2 stages x uneven replicas, recomputed": {
        "stages": 2, "replicas": (2, 1), "microbatches": 1, "recompute": ("full",),
    },
    "2 stages x 2 replicas x uneven searched shards, zero-1": {
        "stages": 2, "replicas": (1, 1), "shards": (2, 1), "sharding": "searched", "microbatches": 2,
            "sharded_state": "optimizer",
    },
}  # fmt: skip


@lru_cache
def whole(name: str, **options: Any) -> whole_cases.Whole:
    torch.manual_seed(1)
    sequence = 1 if name in ("vgg", "vit", "hugging_vit") else TOKENS
    return whole_cases.Whole({**HAP, **OTHERS}[name](**options), sequence=sequence)


def run(pool, one: whole_cases.Whole, plan: Plan, steps: int = STEPS) -> Any:
    """What rank 0 says."""
    pool.run(cases.prepare, [(plan, one.model)], ranks=8)
    return pool.run(whole_cases.train_whole, plan, *one.material, steps, ranks=len(plan.used_devices))[0]


def same(found: Any, losses: list[float], parameters: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(found[0], losses, rtol=1e-10)
    for name, value in found[1].items():
        bound = 1e-8 * np.abs(parameters[name]).max() + 1e-12  # some gradients are zero but for rounding
        np.testing.assert_allclose(value, parameters[name], rtol=0, atol=bound, err_msg=name)


CASES = [(name, layout) for name in ("vgg", "vit", "bert") for layout in LAYOUTS] + [("llama", "2 stages x 2 replicas")]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_users_module_trains_as_under_plain_pytorch(gloo_pool, name, layout):
    one = whole(name)
    plan = one.plan(**LAYOUTS[layout])
    assert len(plan.stages) > 1
    same(run(gloo_pool, one, plan), *one.reference(plan, STEPS))


def test_dropout_within_a_users_module_does_not_depend_on_the_layout(gloo_pool):
    one = whole("vgg", dropout=0.5)
    alone = run(gloo_pool, one, one.plan(microbatches=1))
    same(run(gloo_pool, one, one.plan(**LAYOUTS["2 stages x 2 replicas"])), *alone[:2])
    without = whole("vgg")
    assert abs(alone[0][0] - run(gloo_pool, without, without.plan(microbatches=1), 1)[0][0]) > 1e-6


def test_an_evaluation_is_the_mean_over_the_rows_held_out(gloo_pool):
    one = whole("bert")
    plan = one.plan(**LAYOUTS["2 stages x 2 replicas"])
    rows = one.samples.rows.held_out_rows(0, 8)
    given = {n: torch.from_numpy(v) for n, v in one.samples.take_rows(rows, list(one.fed), 0, -1).items()}
    one.reference(plan, 0)
    wanted = float(one._loss(one.example.module, given).detach())
    assert run(gloo_pool, one, plan, 0)[2] == pytest.approx(wanted, rel=1e-10)
