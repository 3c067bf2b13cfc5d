"""Every plan is of one kind, by its refinements first and then by its axes."""

from __future__ import annotations

from typing import Any

import pytest

from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.request.plan_kinds import PLAN_KINDS, kind_name, parallel_axes

TENSOR: dict[str, Any] = {"shards": (1, 1), "sharding": "megatron-sp"}
EXPERT: dict[str, Any] = {"shards": (1, 1), "sharding": "expert"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("one device", {}),
    ("context", {"context": 2}),
    ("context + data", {"context": 2, "replicas": (1, 1), "sharded_state": "parameters"}),
    ("context + tensor or pipeline", {"context": 2, "stages": 2}),
    ("context + tensor or pipeline", {"context": 2, **TENSOR}),
    ("data parallel", {"replicas": (1, 1)}),
    ("sharded data parallel", {"replicas": (1, 1), "sharded_state": "optimizer"}),
    ("hybrid sharded data parallel", {"replicas": (1,) * 4, "sharded_state": "parameters", "state_group": 2}),
    ("sharded data parallel", {"replicas": (1,) * 4, "sharded_state": "parameters", "state_group": 4}),
    ("tensor", TENSOR),
    ("tensor + data", {**TENSOR, "replicas": (1, 1), "sharded_state": "optimizer"}),
    ("expert", EXPERT),
    ("expert + data", {**EXPERT, "replicas": (1, 1), "sharded_state": "optimizer"}),
    ("expert + tensor", {**TENSOR, "expert": 2}),
    ("expert + tensor + data", {**TENSOR, "expert": 2, "replicas": (1, 1), "sharded_state": "optimizer"}),
    ("expert + pipeline or context", {**EXPERT, "stages": 2}),
    ("expert + pipeline or context", {**TENSOR, "expert": 2, "stages": 2}),
    ("expert + pipeline or context", {**EXPERT, "context": 2}),
    ("pipeline", {"stages": 2}),
    ("one device", {"stages": 2, "placement": (0, 0)}),
    ("pipeline + data", {"stages": 2, "replicas": (2, 1)}),
    ("pipeline + tensor", {**TENSOR, "stages": 2}),
    ("pipeline + tensor + data", {**TENSOR, "stages": 2, "replicas": (1, 1)}),
    ("searched shard programs", {"shards": (1, 1), "sharding": "searched", "replicas": (1, 1)}),
    ("token slices", {"stages": 2, "slices": (32, 32), "schedule": "fit"}),
    ("fitted order", {"stages": 2, "schedule": "fit"}),
    ("device groups", {"stages": 2, "shards": (1, 1), "sharding": "searched", "lane_shards": ((1, 1), (1,))}),
]


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_a_plan_is_of_the_kind_that_people_would_name(name: str, fields: dict[str, Any]) -> None:
    assert kind_name(ParallelConfig(**fields)) == name


def test_every_kind_has_a_case_and_a_name_of_its_own() -> None:
    assert {name for name, _ in CASES} == {kind.name for kind in PLAN_KINDS}
    assert len({kind.name for kind in PLAN_KINDS}) == len(PLAN_KINDS)


def test_axes_are_those_with_several_parts() -> None:
    assert parallel_axes(ParallelConfig(**TENSOR, stages=2, replicas=(1, 1))) == ("data", "tensor", "pipeline")
    assert parallel_axes(ParallelConfig(**EXPERT, context=2, replicas=(1, 1))) == ("data", "expert", "context")
    assert parallel_axes(ParallelConfig()) == ()
