"""Whole-process bytes of a rank, parameters to buffers, against the simulator's peak: within 0.3 %.

Beside `tests/run/worker/test_memory.py`, which looks at activations of dense models: experts,
shared parameters, shards.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.support import worker_plans as plans

from pipefit.cluster import local_cluster
from pipefit.cost.static_memory import WORKSPACE_BYTES, Precision
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import describe_config
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.run.verify.verify import measure_rank
from pipefit.run.worker.worker import device_lane

LLAMA = plans.LLAMA | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_key_value_heads": 4}
CONFIGS = {
    "tied": LLAMA | {"tie_word_embeddings": True},
    "experts": plans.MIXTRAL | LLAMA | {"model_type": "mixtral", "num_hidden_layers": 4},
    "narrow experts": plans.MIXTRAL | LLAMA | {"model_type": "mixtral", "intermediate_size": 24},
    "gpt2": plans.GPT2 | {"vocab_size": 512, "n_positions": 128, "n_embd": 64, "n_layer": 6},
}
CONFIGS["few heads"] = CONFIGS["tied"] | {"num_key_value_heads": 2}
CONFIGS |= {"wide": CONFIGS["tied"] | {"vocab_size": 8192}, "wide untied": LLAMA | {"vocab_size": 8192}}
CONFIGS["long"] = LLAMA | {"vocab_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
V = (0, 1, 2, 2, 1, 0)
EXPERTS = {"shards": (1, 1), "sharding": "expert"}
AXIS = {"expert": 2, "shards": (1, 1), "sharding": "megatron-sp", "microbatches": 2}
GROUPS = {"replicas": (1, 1), "context": 2, "state_group": 2}

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tied, first": ("tied", 0, {"stages": 4, "schedule": "1f1b"}),
    "tied, last": ("tied", 3, {"stages": 4, "schedule": "1f1b"}),
    "tied on one lane": ("gpt2", 0, {"stages": 6, "placement": V, "schedule": "v-half"}),
    "experts": ("experts", 1, {"stages": 4, "schedule": "1f1b"}),
    "experts, weight gradients put off": ("experts", 1, {"stages": 4, "schedule": "zb-h1"}),
    "experts run again": ("experts", 2, {"stages": 4, "schedule": "1f1b", "recompute": ("full",)}),
    "narrow experts": ("narrow experts", 1, {"stages": 4, "schedule": "1f1b"}),
    "experts divided with rows": ("experts", 0, EXPERTS),
    "experts divided with rows, 2 stages": ("experts", 2, EXPERTS | {"stages": 2, "schedule": "1f1b"}),
    "bfloat16, experts divided with rows": ("experts", 1, EXPERTS | {"stages": 2, "schedule": "zb-h1"}),
    "narrow experts divided with rows": ("narrow experts", 1, EXPERTS | {"stages": 2, "schedule": "1f1b"}),
    "split state, experts divided with rows": ("experts", 1, EXPERTS | {"sharded_state": "optimizer"}),
    "split state, experts divided with rows, replicas": (
        "experts",
        3,
        EXPERTS | {"replicas": (1, 1), "microbatches": 2, "sharded_state": "optimizer", "recompute": ("full",)},
    ),
    "experts divided beside tensors": ("experts", 0, AXIS),
    "experts divided beside tensors, 2 stages": ("experts", 5, AXIS | {"stages": 2, "schedule": "1f1b"}),
    "narrow experts divided beside tensors": ("narrow experts", 1, AXIS | {"recompute": ("selective",)}),
    "split state, experts divided beside tensors": ("experts", 2, AXIS | {"sharded_state": "optimizer"}),
    "experts divided with tokens": ("experts", 0, {"shards": (1, 1), "sharding": "megatron-sp", "stages": 2}),
    "shards": ("tied", 0, {"stages": 2, "shards": (1, 1), "sharding": "megatron", "schedule": "1f1b"}),
    "few activations, split state": (
        "wide",
        0,
        {"replicas": (1, 1), "sharded_state": "optimizer", "recompute": ("full",)},
    ),
    "few activations, shared": ("wide", 0, {"stages": 4, "schedule": "1f1b", "recompute": ("full",)}),
    "few activations": ("wide untied", 0, {"replicas": (1, 1), "recompute": ("full",)}),
    "split state": ("gpt2", 0, {"stages": 2, "replicas": (1, 1), "sharded_state": "optimizer", "schedule": "1f1b"}),
    "a message left": ("wide untied", 1, {"stages": 4, "schedule": "1f1b", "recompute": ("full",)}),
    "bfloat16, last": ("gpt2", 3, {"stages": 4, "schedule": "1f1b", "recompute": ("selective",)}),
    "bfloat16, first": ("gpt2", 0, {"stages": 2, "replicas": (1, 1), "sharded_state": "optimizer", "schedule": "1f1b"}),
    "bfloat16, weight gradients put off": ("gpt2", 3, {"stages": 4, "schedule": "zb-h1", "recompute": ("full",)}),
    "bfloat16, experts": ("experts", 3, {"stages": 4, "schedule": "1f1b"}),
    "slices, run again": ("tied", 1, {"stages": 2, "slices": (64, 64), "recompute": ("full",)}),
    "bfloat16, slices": ("gpt2", 1, {"stages": 2, "slices": (64, 64), "schedule": "1f1b"}),
    "bfloat16, slices of few heads": ("few heads", 1, {"stages": 2, "slices": (32, 48, 48), "schedule": "1f1b"}),
    "bfloat16, slices, run again": ("gpt2", 1, {"stages": 2, "slices": (64, 64), "recompute": ("full",)}),
    "bfloat16, slices, parts run again": ("gpt2", 1, {"stages": 2, "slices": (64, 64), "recompute": ("selective",)}),
    "parts of sequences, first": ("tied", 0, {"context": 2, "stages": 2, "schedule": "1f1b"}),
    "parts of sequences, last": ("tied", 3, {"context": 2, "stages": 2, "schedule": "1f1b"}),
    "4 parts of sequences": ("few heads", 0, {"context": 4}),
    "parts of sequences, run again": ("tied", 0, {"context": 2, "recompute": ("full",)}),
    "parts of sequences, long": ("long", 0, {"context": 2, "stages": 2, "schedule": "zb-h1"}),
    "4 parts of sequences, long": ("long", 0, {"context": 4}),
    "bfloat16, parts of sequences": ("gpt2", 2, {"context": 2, "stages": 2, "schedule": "1f1b"}),
    "parts of sequences that split the state": ("wide", 0, {"context": 2, "sharded_state": "optimizer"}),
    "split state in groups": ("wide", 1, GROUPS | {"sharded_state": "optimizer", "recompute": ("full",)}),
    "split state in groups, last": ("gpt2", 6, GROUPS | {"stages": 2, "sharded_state": "optimizer"}),
    "split state, shared": (
        "tied",
        0,
        {"stages": 2, "replicas": (1, 1), "sharded_state": "optimizer", "recompute": ("full",)},
    ),
}


LAYERS_IN_GROUPS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "split gradients": ("few heads", 0, GROUPS | {"sharded_state": "gradients"}),
    "split gradients, 2 stages": ("gpt2", 5, GROUPS | {"stages": 2, "sharded_state": "gradients"}),
    "split parameters": ("wide untied", 2, GROUPS | {"sharded_state": "parameters"}),
    "split gradients, experts divided": ("experts", 1, EXPERTS | {"sharded_state": "gradients"}),
    "split gradients, experts divided beside tensors": ("experts", 1, AXIS | {"sharded_state": "gradients"}),
    "split parameters, experts divided": ("narrow experts", 0, EXPERTS | {"sharded_state": "parameters"}),
    "bfloat16, split parameters": ("gpt2", 3, GROUPS | {"sharded_state": "parameters"}),
}


@lru_cache
def model(name: str) -> Model:
    described = describe_config(CONFIGS[name], name, name)
    return capture_family(described.family, described.config)


@pytest.mark.parametrize("case", CASES)
def test_the_predicted_peak_is_the_measured_one(case: str) -> None:
    simulated, measured = compare_peaks(case, *CASES[case])
    assert simulated == pytest.approx(measured.train, rel=0.003)
    assert max(measured.build, measured.evaluate) < measured.train, "what the plan has no room for"


@pytest.mark.parametrize("case", LAYERS_IN_GROUPS)
def test_layers_sharded_over_groups_are_predicted_on_the_safe_side(case: str) -> None:
    """As without groups, not every layer that is complete for a moment is the largest one."""
    simulated, measured = compare_peaks(case, *LAYERS_IN_GROUPS[case])
    assert 0.997 * measured.train < simulated < 1.09 * measured.train
    assert max(measured.build, measured.evaluate) < measured.train


def compare_peaks(case: str, name: str, rank: int, decisions: dict[str, Any]) -> tuple[float, Any]:
    """The predicted peak without workspace, and the measured bytes."""
    precision: Precision = "bfloat16" if "bfloat16" in case else "float32"
    sequence = {"wide": 16, "wide untied": 16, "long": 1024}.get(name, 128)
    job = Job(batch=4 if name == "long" else 8, sequence=sequence, precision=precision, seed=5)
    plan = build_plan(
        model(name), local_cluster(8), job, ParallelConfig(**({"microbatches": 4} | decisions)), name=name
    )
    simulated = simulate_plan(plan, model(name), local_cluster(8)).peaks_bytes[
        device_lane(plan, plan.used_devices[rank])
    ]
    return simulated - WORKSPACE_BYTES, measure_rank(plan, model(name), rank, torch.device("cpu"), 1)
