"""Adapters under layouts of several processes: three steps equal those of one process, in float64."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from tests.support import adapter_cases as adapters
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.cluster import local_cluster
from pipefit.cost.memory.lanes import lane_parts
from pipefit.model.adapters.adapt import freeze_parameters
from pipefit.model.adapters.options import AdapterConfig
from pipefit.model.adapters.targets import is_adapter
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.check.rules import check_plan

pytestmark = pytest.mark.gloo

STEPS = 3
OPTIONS = AdapterConfig(rank=4, alpha=6.0, dropout=0.25)
"""With dropout, whose masks do not depend on the layout either."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "stages x replicas": {"stages": 2, "microbatches": 2, "replicas": (1, 1)},
    "zero-bubble, full recomputation": {
        "stages": 2, "microbatches": 4, "schedule": "zb-h1", "recompute": ("full", "selective"),
    },
    "zero-1": {"microbatches": 2, "replicas": (1, 1), "sharded_state": "optimizer"},
    "zero-2": {"microbatches": 2, "replicas": (1, 1), "sharded_state": "gradients"},
    "zero-3": {"stages": 2, "microbatches": 2, "replicas": (1, 1), "sharded_state": "parameters"},
    "zero-3, zero-bubble, full recomputation": {
        "stages": 2, "microbatches": 2, "replicas": (1, 1), "sharded_state": "parameters", "schedule": "zb-h1",
        "recompute": ("full", "none"),
    },
    "stages without adapters": {"stages": 3, "cuts": (1, 5), "microbatches": 2, "schedule": "zb-h1"},
    "stages without adapters, zero-3": {
        "stages": 3, "cuts": (1, 5), "microbatches": 2, "replicas": (1, 1), "sharded_state": "parameters",
    },
    "zero-3, shards": {
        "microbatches": 2, "replicas": (1, 1), "shards": (1, 1), "sharding": "megatron", "sharded_state": "parameters",
    },
    "megatron": {"microbatches": 2, "shards": (1, 1), "sharding": "megatron"},
    "megatron-sp": {"microbatches": 2, "shards": (1, 1), "sharding": "megatron-sp", "recompute": ("selective",)},
    "searched": {"microbatches": 2, "shards": (1, 1), "sharding": "searched"},
    "slices": {"stages": 2, "microbatches": 2, "slices": (5, 7)},
    "context": {"microbatches": 2, "context": 2},
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"microbatches": 1, "replicas": (1, 1), "shards": (1, 1), "sharding": "expert"},
    "experts, zero-3": {
        "microbatches": 1, "replicas": (1, 1), "shards": (1, 1), "sharding": "expert", "sharded_state": "parameters",
    },
    "expert axis, zero-3": {
        "microbatches": 1, "replicas": (1, 1), "expert": 2, "shards": (1, 1), "sharding": "megatron-sp",
        "sharded_state": "parameters",
    },
}  # fmt: skip
CASES = [
    *(("llama", layout) for layout in LAYOUTS),
    *(("mixtral", layout) for layout in EXPERTS),
    ("phi3", "stages x replicas"), ("phi3", "megatron"), ("gpt2", "megatron-sp"), ("gpt2", "zero-1"),
]  # fmt: skip
LAYOUTS |= EXPERTS


@lru_cache
def model(name: str) -> Model:
    return adapters.adapted_model(plans.CONFIGS[name], OPTIONS)


@lru_cache
def frozen_model() -> Model:
    """A Llama whose first half is not trained."""
    return freeze_parameters(plans.model("llama"), ["model.embed_tokens.*", "*.layers.0.*", "*.layers.1.*"])


def trained(pool: Any, model: Model, ranks: int, **decisions: Any) -> dict[str, Any]:
    plan = adapters.plan_of(model, **decisions)
    check_plan(plan, model)
    pool.run(cases.prepare, [(plan, model)], ranks=pool.size)
    return pool.run(cases.run_steps, plan, model, plans.VOCABULARY, STEPS, ranks=ranks)[0]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_layouts_train_as_one_process_does(gloo_pool: Any, name: str, layout: str) -> None:
    decisions = LAYOUTS[layout]
    ranks = decisions.get("stages", 1) * len(decisions.get("replicas", (1,))) * len(decisions.get("shards", (1,)))
    ranks *= decisions.get("context", 1) * decisions.get("expert", 1)
    result = trained(gloo_pool, model(name), ranks, **decisions)
    alone = trained(gloo_pool, model(name), 1, microbatches=1)
    np.testing.assert_allclose(result["steps"], alone["steps"], rtol=1e-9)
    assert {*result["gradients"]} == {key for key in alone["parameters"] if is_adapter(key)}
    for key, expected in alone["parameters"].items():
        if is_adapter(key):
            np.testing.assert_allclose(result["parameters"][key], expected, rtol=0, atol=1e-9, err_msg=key)
        else:
            np.testing.assert_array_equal(result["parameters"][key], expected, err_msg=key)


@pytest.mark.parametrize("layout", [name for name in EXPERTS if "zero-3" in name])
def test_devices_hold_the_predicted_parts(gloo_pool: Any, layout: str) -> None:
    plan = adapters.plan_of(model("mixtral"), **EXPERTS[layout])
    ranks = len(plan.used_devices)
    gloo_pool.run(cases.prepare, [(plan, model("mixtral"))], ranks=gloo_pool.size)
    held = gloo_pool.run(adapters.held_bytes, plan, model("mixtral"), ranks=ranks)
    (parts,) = lane_parts(simulate_plan(plan, model("mixtral"), local_cluster(8)).work)
    for measured in held:
        for part in ("parameters", "gradients", "optimizer"):
            assert measured[part] == pytest.approx(parts[part], rel=0.1), part  # padding


def test_training_lowers_the_loss_and_leaves_the_base_alone(gloo_pool: Any) -> None:
    result = trained(gloo_pool, model("llama"), 1, microbatches=1)
    first = trained(gloo_pool, model("llama"), 1, microbatches=2)
    assert result["steps"][0][0] == pytest.approx(first["steps"][0][0])
    outer = [value for key, value in result["parameters"].items() if key.endswith("lora_B.weight")]
    assert outer and all(np.abs(value).max() > 0 for value in outer), "B left zero"


@pytest.mark.parametrize("layout", ["stages x replicas", "zero-3", "zero-3, zero-bubble, full recomputation", "slices"])
def test_frozen_stages_and_layers_have_no_backward(gloo_pool: Any, layout: str) -> None:
    """Cut behind the frozen layers, and within them."""
    alone = trained(gloo_pool, frozen_model(), 1, microbatches=1)
    for cut in (3, 2):
        decisions = LAYOUTS[layout] | {"cuts": (cut,)}
        result = trained(gloo_pool, frozen_model(), 2 * len(decisions.get("replicas", (1,))), **decisions)
        np.testing.assert_allclose(result["steps"], alone["steps"], rtol=1e-9)
        assert {*result["gradients"]} == {*alone["gradients"]}
        assert not any(".0." in key or ".1." in key for key in result["gradients"])
        for key, expected in alone["parameters"].items():
            np.testing.assert_allclose(result["parameters"][key], expected, rtol=0, atol=1e-9, err_msg=key)
