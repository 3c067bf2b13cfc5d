"""What a rank has alive when it is verified alone is what it has alive in a real run of all ranks over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import verify_cases
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.cluster import local_cluster
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job, Plan
from pipefit.run.verify.alone import AloneGroup
from pipefit.run.verify.verify import MeasuredMemory, measure_rank

pytestmark = pytest.mark.gloo

V = (0, 1, 2, 3, 3, 2, 1, 0)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v-half": ("deep", {"stages": 8, "placement": V, "schedule": "v-half"}),
    "tied": ("tied", {"stages": 4, "schedule": "zb-h1"}),
    "replicas that split the state": (
        "llama",
        {"stages": 2, "replicas": (1, 1), "sharded_state": "optimizer", "schedule": "1f1b"},
    ),
    "replicas that split the gradients": (
        "llama",
        {"stages": 2, "replicas": (1, 1), "sharded_state": "gradients", "schedule": "1f1b"},
    ),
    "sharded": ("llama", {"stages": 2, "shards": (1, 1), "sharding": "megatron", "schedule": "1f1b"}),
    "sequence-sharded": ("llama", {"stages": 2, "shards": (1, 1), "sharding": "megatron-sp", "schedule": "1f1b"}),
    "parts of sequences": ("llama", {"stages": 2, "context": 2, "schedule": "zb-h1"}),
    "parts of sequences that split the state": (
        "llama",
        {"context": 2, "replicas": (1, 1), "sharded_state": "optimizer", "recompute": ("full",)},
    ),
    "slices": ("llama", {"stages": 4, "schedule": "1f1b", "slices": (40, 24), "recompute": ("full",)}),
    "experts": ("mixtral", {"stages": 4, "schedule": "1f1b"}),
    "experts divided with rows": (
        "mixtral",
        {"stages": 2, "shards": (1, 1), "sharding": "expert", "sharded_state": "optimizer", "schedule": "1f1b"},
    ),
    "experts divided beside tensors": (
        "eight-experts",
        {"stages": 2, "expert": 2, "shards": (1, 1), "sharding": "megatron-sp", "schedule": "1f1b"},
    ),
    "uneven replicas": ("wide", {"stages": 2, "replicas": (2, 1), "schedule": "1f1b"}),
    "eight": ("deep", {"stages": 4, "replicas": (1, 1), "schedule": "1f1b", "sharded_state": "optimizer"}),
}


@pytest.fixture(autouse=True)
def deep_model(monkeypatch) -> None:
    monkeypatch.setitem(plans.CONFIGS, "deep", plans.LLAMA | {"num_hidden_layers": 8})


def plan_of(name: str, **decisions: Any) -> Plan:
    job = Job(batch=12 if name == "wide" else 8, sequence=64, precision="float32", seed=5)
    return build_plan(plans.model(name), local_cluster(8), job, ParallelConfig(microbatches=4, **decisions), name=name)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_alone_takes_what_it_takes_among_the_others(gloo_pool, case: str) -> None:
    name, decisions = CASES[case]
    plan, model = plan_of(name, **decisions), plans.model(name)
    ranks = len(plan.used_devices)
    gloo_pool.run(cases.prepare, [(plan, model)], ranks=gloo_pool.size)
    alone = [measure_rank(plan, model, rank, torch.device("cpu")) for rank in range(ranks)]
    for last in (False, False, True):  # what gloo's threads free too late for the record is not there the next time
        real = gloo_pool.run(verify_cases.counted_rank, plan, model, ranks=ranks)
        if last or list(map(figures, real)) == list(map(figures, alone)):
            break
    near = 0.1 if "divided" in case else 0.002  # the real routing is not balanced
    for one, other in zip(alone, real, strict=True):
        assert figures(one) == pytest.approx(figures(other), rel=near)


def figures(measured: MeasuredMemory) -> list[int]:
    return [measured.build, measured.train, measured.evaluate]


def test_peers_count_as_many_tokens_as_they_get() -> None:
    """On both paths of an exchange: messages between processors, and the all-to-all of GPUs."""
    sent = torch.tensor([5, 1, 2, 4])
    for one_call in (False, True):
        group, received = AloneGroup(1, 2), torch.full((4,), -1)
        if one_call:
            group.all_to_all_single(received, sent, [2, 2], [2, 2])
            assert received.tolist() == [3, 3, 2, 4], "the own part, and the sum of the other spread evenly"
        else:
            places, pieces = received.split(2), sent.split(2)
            group.recv([places[0]], 0, 0)
            group.send([pieces[0]], 0, 0)
            assert received[:2].tolist() == [3, 3]
    numbers = torch.zeros(2, 3)
    AloneGroup(0, 2).all_to_all_single(numbers, torch.ones(2, 3), [1, 1], [1, 1])
    assert numbers[0].tolist() == [1, 1, 1] and 0 < float(numbers[1].abs().max()) < 1
