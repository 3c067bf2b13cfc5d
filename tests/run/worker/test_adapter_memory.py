"""Memory of runs with adapters against the simulator, within 1 %, as `test_memory.py` has it for complete models."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from tests.support import adapter_cases as adapters
from tests.support import memory_cases
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.cluster import local_cluster
from pipefit.model.adapters.options import AdapterConfig
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.schedule import FAMILIES

pytestmark = pytest.mark.gloo

DEVICES, MICROBATCHES, SEQUENCE = 4, 8, 128
LLAMA = plans.LLAMA | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 14, "num_key_value_heads": 4,
}  # fmt: skip
DECISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("1f1b", {}),
    "zb-h1, bfloat16": ("zb-h1", {"precision": "bfloat16"}),
    "v-half, selective": ("v-half", {"recompute": ("selective",)}),
    "v-half, full": ("v-half", {"recompute": ("full",)}),
    "dropout": ("1f1b", {"dropout": 0.1}),
    "tensor": ("1f1b", {"shards": (1, 1), "sharding": "megatron"}),
    "sequence": ("v-half", {"shards": (1, 1), "sharding": "megatron-sp"}),
    "zero-1": ("1f1b", {"replicas": (1, 1), "sharded_state": "optimizer"}),
}


@lru_cache
def model(dropout: float) -> Model:
    return adapters.adapted_model(LLAMA, AdapterConfig(rank=8, alpha=16.0, dropout=dropout))


@pytest.mark.parametrize("case", DECISIONS)
def test_the_simulated_peak_is_the_measured_one(gloo_pool: Any, case: str) -> None:
    family, choices = DECISIONS[case]
    choices = dict(choices)
    adapted, precision = model(choices.pop("dropout", 0.0)), choices.pop("precision", "float32")
    replicas = sum(choices.get("replicas", (1,))) * sum(choices.get("shards", (1,)))
    placement = FAMILIES[family].placement(DEVICES // replicas)
    decisions = ParallelConfig(
        stages=len(placement),
        placement=() if len(placement) == DEVICES // replicas else placement,
        schedule=family,
        microbatches=MICROBATCHES,
        **choices,
    )
    job = Job(batch=MICROBATCHES * len(choices.get("replicas", (1,))), sequence=SEQUENCE, precision=precision, seed=5)
    plan = build_plan(adapted, local_cluster(DEVICES), job, decisions, name="m")
    gloo_pool.run(cases.prepare, [(plan, adapted)], ranks=gloo_pool.size)
    measured = gloo_pool.run(memory_cases.audited_step, plan, adapted, LLAMA["vocab_size"], ranks=DEVICES)
    simulation = simulate_plan(plan, adapted, local_cluster(DEVICES))
    lanes = simulation.timeline.peak_bytes - simulation.timeline.costs.static_bytes
    groups = [stage.group.devices for stage in simulation.work.stages]
    simulated = [
        float(next(lanes[s.lane] for s, g in zip(simulation.work.stages, groups, strict=True) if device in g))
        for device in range(DEVICES)
    ]
    tolerance = 0.03 if case == "dropout" else 0.01  # the numbers of a mask are not counted
    assert [float(peak) for peak, _, _ in measured] == pytest.approx(simulated, rel=tolerance)
