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
from pipefit.cost.memory.lanes import lane_parts
from pipefit.model.adapters.options import AdapterConfig
from pipefit.model.graph import Model
from pipefit.plan.assemble.predict import PlanSimulation, simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
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
    "zero-3": ("1f1b", {"replicas": (1, 1), "sharded_state": "parameters"}),
    "zero-3, full": ("v-half", {"replicas": (1, 1), "sharded_state": "parameters", "recompute": ("full",)}),
    "zero-1": ("1f1b", {"replicas": (1, 1), "sharded_state": "optimizer"}),
}


QUICK = ("1f1b", "v-half, selective", "sequence", "zero-3")


@lru_cache
def model(dropout: float) -> Model:
    return adapters.adapted_model(LLAMA, AdapterConfig(rank=8, alpha=16.0, dropout=dropout))


def plan_case(case: str) -> tuple[Plan, Model]:
    """A plan of DECISIONS, and its model."""
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
    return build_plan(adapted, local_cluster(DEVICES), job, decisions, name="m"), adapted


def by_device(simulation: PlanSimulation, lanes: Any) -> list[Any]:
    """Values by lane as values by device."""
    groups = [stage.group.devices for stage in simulation.work.stages]
    return [
        next(lanes[stage.lane] for stage, group in zip(simulation.work.stages, groups, strict=True) if device in group)
        for device in range(DEVICES)
    ]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in DECISIONS]
)
def test_the_simulated_peak_is_the_measured_one(gloo_pool: Any, case: str) -> None:
    plan, adapted = plan_case(case)
    gloo_pool.run(cases.prepare, [(plan, adapted)], ranks=gloo_pool.size)
    measured = gloo_pool.run(memory_cases.audited_step, plan, adapted, LLAMA["vocab_size"], ranks=DEVICES)
    simulation = simulate_plan(plan, adapted, local_cluster(DEVICES))
    simulated = by_device(simulation, simulation.timeline.peak_bytes - simulation.timeline.costs.static_bytes)
    # not counted: the numbers of a mask, and gloo's copies of gathered layers
    tolerance = {"dropout": 0.03, "zero-3": 0.05, "zero-3, full": 0.05}.get(case, 0.01)
    assert [float(peak) for peak, _, _ in measured] == pytest.approx(simulated, rel=tolerance)


@pytest.mark.parametrize("case", ["1f1b", "zb-h1, bfloat16", "tensor", "zero-1", "zero-3"])
def test_state_is_held_for_adapters_only(gloo_pool: Any, case: str) -> None:
    """Bytes of parameters, gradients and optimizer on every device: those predicted, but for padding."""
    plan, adapted = plan_case(case)
    gloo_pool.run(cases.prepare, [(plan, adapted)], ranks=gloo_pool.size)
    held = gloo_pool.run(adapters.held_bytes, plan, adapted, ranks=DEVICES)
    simulation = simulate_plan(plan, adapted, local_cluster(DEVICES))
    for measured, predicted in zip(held, by_device(simulation, lane_parts(simulation.work)), strict=True):
        for part in ("parameters", "gradients", "optimizer"):
            assert measured[part] == pytest.approx(predicted[part], rel=0.02), part
        assert measured["gradients"] < measured["parameters"] / 2
