"""SGD and Adafactor in pipelines, with ZeRO-1, shards and tied weights: equal to `torch.optim` in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.plan.types import Plan
from pipefit.run.update.optimizer import OptimizerConfig

pytestmark = pytest.mark.gloo

CONFIGS = {
    "sgd": OptimizerConfig(lr=1e-2, weight_decay=0.1, max_norm=0.0, options={"momentum": 0.8}),
    "adafactor": OptimizerConfig(lr=1e-2, weight_decay=0.1, max_norm=0.0, options={"eps": 1e-8}),
}
TORCH: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.8),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2, eps=(1e-8, 1e-3)),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {"microbatches": 2},
    "2 stages x 2 replicas, zero-1": {"stages": 2, "microbatches": 2, "replicas": (1, 1), "sharded_state": "optimizer"},
    "2 stages x 2 shards x 2 replicas, zero-1": {
        "stages": 2, "microbatches": 2, "replicas": (1, 1), "shards": (1, 1), "sharding": "megatron-sp",
            "sharded_state": "optimizer",
    },
    "2 stages x 3 uneven replicas, zero-2": {
        "stages": 2, "microbatches": 2, "replicas": (2, 1, 1), "sharded_state": "gradients",
    },
    "2 shards x 2 replicas, zero-3": {
        "microbatches": 2, "replicas": (1, 1), "shards": (1, 1), "sharding": "megatron-sp",
            "sharded_state": "parameters",
    },
    "4 replicas in groups, zero-2": {
        "microbatches": 2, "replicas": (1,) * 4, "state_group": 2, "sharded_state": "gradients",
    },
    "2 shards x 4 replicas in groups, zero-1": {
        "microbatches": 2, "replicas": (1,) * 4, "state_group": 2, "shards": (1, 1), "sharding": "megatron-sp",
            "sharded_state": "optimizer",
    },
    "3 uneven replicas x 2 shards": {
        "microbatches": 2, "replicas": (2, 1, 1), "shards": (1, 1), "sharding": "megatron",
    },
}  # fmt: skip


def plan(optimizer: str, layout: str, name: str = "tied") -> Plan:
    return plans.plan(name, replace(plans.JOB, optimizer=optimizer), **LAYOUTS[layout])


def pytorchs(optimizer: str, name: str, steps: int) -> dict[str, np.ndarray]:
    """The parameters of the plain modules after these steps of torch's own optimizer."""
    layers = plans.plain_layers(name, plans.JOB)
    named = {layer.parameter_names[k]: v for layer in layers for k, v in layer.named_parameters()}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    other = TORCH[optimizer](groups)
    for step in range(steps):
        tokens, labels, divisor = cases.rows_of(plans.plan(name), step, plans.VOCABULARY)
        other.zero_grad()
        (plans.plain_loss(layers, tokens, labels) / divisor).backward()
        other.step()
    return {parameter: value.detach().numpy() for parameter, value in named.items()}


def agree(found: Any, wanted: Any) -> None:
    assert set(found) == set(wanted)
    for parameter, value in wanted.items():
        error = np.abs(found[parameter] - value).max()
        assert error <= 1e-8 * np.abs(value).max(), f"{parameter}: {error}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", CONFIGS)
def test_every_layout_is_pytorchs_optimizer(gloo_pool, optimizer, layout):
    one = plan(optimizer, layout)
    gloo_pool.run(cases.prepare, [(one, plans.model("tied"))], ranks=8)
    arguments = (one, plans.model("tied"), plans.VOCABULARY, 3, True, CONFIGS[optimizer])
    found = gloo_pool.run(cases.run_steps, *arguments, ranks=len(one.used_devices))[0]
    agree(found["parameters"], pytorchs(optimizer, "tied", 3))


@pytest.mark.parametrize("optimizer", CONFIGS)
def test_a_resume_under_another_layout_continues(gloo_pool, tmp_path: Path, optimizer):
    first, second = plan(optimizer, "2 stages x 2 shards x 2 replicas, zero-1"), plan(optimizer, "one process")
    straight = plan(optimizer, "one process")
    gloo_pool.run(cases.prepare, [(one, plans.model("tied")) for one in (first, second)], ranks=8)
    arguments = (str(tmp_path), first, second, plans.model("tied"), plans.VOCABULARY, (2, 4))
    resumed = gloo_pool.run(cases.interrupted, *arguments, ranks=8)[0]
    whole = gloo_pool.run(cases.uninterrupted, straight, plans.model("tied"), plans.VOCABULARY, (2, 4), ranks=1)[0]
    np.testing.assert_allclose(resumed["steps"], whole["steps"], rtol=1e-9)
    agree(resumed["parameters"], whole["parameters"])


def test_a_checkpoint_of_another_optimizer_is_refused(gloo_pool, tmp_path: Path):
    first, second = plan("sgd", "one process"), plan("adafactor", "one process")
    gloo_pool.run(cases.prepare, [(first, plans.model("tied"))], ranks=8)
    arguments = (str(tmp_path), first, second, plans.model("tied"), plans.VOCABULARY, (1, 2))
    with pytest.raises(Exception, match="another optimizer"):
        gloo_pool.run(cases.interrupted, *arguments, ranks=1)
