"""What outlives a step: resuming bit-equal, resuming under another plan, dropout, evaluation, traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans
from tests.support.worker_plans import plan

from pipefit.plan.types import Job, Plan

pytestmark = pytest.mark.gloo

DROP = Job(batch=8, sequence=12, precision="float64", seed=5)
HALF = replace(DROP, precision="bfloat16")
NARROW = replace(DROP, precision="bfloat16-gradients")


def prepare(pool, name: str, *some: Plan) -> None:
    pool.run(cases.prepare, [(one, plans.model(name)) for one in some], ranks=8)


def interrupted(pool, directory: Path, name: str, first: Plan, second: Plan):
    prepare(pool, name, first, second)
    ranks = max(len(first.used_devices), len(second.used_devices))
    arguments = (str(directory), first, second, plans.model(name), plans.VOCABULARY, (2, 4))
    return pool.run(cases.interrupted, *arguments, ranks=ranks)[0]


def uninterrupted(pool, name: str, one: Plan):
    prepare(pool, name, one)
    arguments = (one, plans.model(name), plans.VOCABULARY, (2, 4))
    return pool.run(cases.uninterrupted, *arguments, ranks=len(one.used_devices))[0]


SAME = {
    "dropout x stages x replicas": ("dropout", {"stages": 2, "microbatches": 4, "replicas": (1, 1)}, DROP),
    "tied, megatron-sp, zero-1": (
        "tied",
        {"stages": 2, "microbatches": 2, "replicas": (1, 1), "shards": (1, 1), "sharding": "megatron-sp"}
        | {"sharded_state": "optimizer"},
        DROP,
    ),
    "dropout x stages, zero-2": (
        "dropout", {"stages": 2, "microbatches": 4, "replicas": (1, 1), "sharded_state": "gradients"}, DROP,
    ),
    "tied, megatron-sp, zero-3": (
        "tied",
        {"stages": 2, "microbatches": 2, "replicas": (1, 1), "shards": (1, 1), "sharding": "megatron-sp"}
        | {"sharded_state": "parameters"},
        DROP,
    ),
    "dropout x parts of sequences": ("dropout", {"stages": 2, "microbatches": 4, "context": 2}, DROP),
    "bfloat16 masters, zero-3": ("llama", {"stages": 2, "microbatches": 2, "replicas": (2, 1),
        "sharded_state": "parameters"}, HALF),
    "bfloat16 masters, zero-1": ("llama", {"stages": 2, "microbatches": 2, "replicas": (2, 1),
        "sharded_state": "optimizer"}, HALF),
    "bfloat16 gradients, zero-2": ("llama", {"stages": 2, "microbatches": 2, "replicas": (2, 1),
        "sharded_state": "gradients"}, NARROW),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_a_resume_under_the_same_plan_continues_bit_equal(gloo_pool, tmp_path, case):
    name, decisions, job = SAME[case]
    the_plan = plan(name, job, **decisions)
    resumed = interrupted(gloo_pool, tmp_path, name, the_plan, the_plan)
    straight = uninterrupted(gloo_pool, name, the_plan)
    assert resumed["steps"] == straight["steps"]
    for parameter, value in straight["parameters"].items():
        assert np.array_equal(resumed["parameters"][parameter], value), parameter


OTHER = {
    "from zero-3 to one process": (
        {"stages": 2, "microbatches": 4, "replicas": (1, 1), "sharded_state": "parameters"},
        {"microbatches": 1},
    ),
    "to zero-3": (
        {"microbatches": 2},
        {"stages": 2, "microbatches": 2, "replicas": (2, 1, 1), "sharded_state": "parameters"},
    ),
    "from zero-2 to zero-3 and shards": (
        {"microbatches": 2, "replicas": (1, 1, 1), "sharded_state": "gradients"},
        {
            "microbatches": 2,
            "replicas": (1, 1),
            "shards": (1, 1),
            "sharding": "megatron-sp",
            "sharded_state": "parameters",
        },
    ),
    "from zero-3 to another zero-3": (
        {"microbatches": 2, "replicas": (1, 1, 1), "sharded_state": "parameters"},
        {"stages": 2, "microbatches": 4, "replicas": (1, 1), "sharded_state": "parameters", "cuts": (3,)},
    ),
    "from parts of sequences to one process": (
        {"stages": 2, "microbatches": 4, "context": 2, "sharded_state": "optimizer"},
        {"microbatches": 1},
    ),
    "to other parts of sequences": (
        {"microbatches": 2, "context": 2, "replicas": (1, 1), "sharded_state": "parameters"},
        {"microbatches": 2, "context": 3, "shards": (1, 1), "sharding": "megatron-sp", "sharded_state": "optimizer"},
    ),
    "to one process": (
        {"stages": 2, "microbatches": 4, "replicas": (1, 1), "sharded_state": "optimizer"},
        {"microbatches": 1},
    ),
    "to more replicas": ({"microbatches": 2}, {"microbatches": 2, "replicas": (2, 1, 1), "sharded_state": "optimizer"}),
    "to shards and stages": (
        {"stages": 3, "microbatches": 4, "replicas": (1, 1)},
        {"stages": 2, "microbatches": 2, "shards": (1, 1), "sharding": "megatron-sp", "sharded_state": "none"},
    ),
    "from shards to another zero-1": (
        {"microbatches": 2, "replicas": (1, 1), "shards": (1, 1), "sharding": "megatron", "sharded_state": "optimizer"},
        {"stages": 2, "microbatches": 2, "replicas": (1, 1, 1), "sharded_state": "optimizer", "cuts": (3,)},
    ),
}


@pytest.mark.parametrize("case", OTHER)
def test_a_resume_under_another_plan_agrees(gloo_pool, tmp_path, case):
    before, after = OTHER[case]
    resumed = interrupted(gloo_pool, tmp_path, "tied", plan("tied", DROP, **before), plan("tied", DROP, **after))
    straight = uninterrupted(gloo_pool, "tied", plan("tied", DROP, microbatches=1))
    np.testing.assert_allclose(resumed["steps"], straight["steps"], rtol=1e-10)
    for parameter, value in straight["parameters"].items():
        error = np.abs(resumed["parameters"][parameter] - value).max()
        assert error <= 1e-10 * np.abs(value).max(), f"{parameter}: {error / np.abs(value).max():.3g}"


def test_dropout_does_not_depend_on_the_layout(gloo_pool):
    layouts = [
        {"microbatches": 1},
        {"stages": 3, "microbatches": 4, "replicas": (1, 1)},
        {"microbatches": 2, "replicas": (2, 1, 1)},
        {"microbatches": 2, "replicas": (1, 1), "recompute": ("full",), "sharded_state": "parameters"},
        {"stages": 2, "microbatches": 2, "slices": (5, 7), "schedule": "gpipe"},
        {"stages": 2, "microbatches": 2, "recompute": ("full",)},
        {"stages": 2, "microbatches": 2, "context": 2, "recompute": ("selective",)},
    ]
    results = []
    for layout in layouts:
        one = plan("dropout", DROP, **layout)
        prepare(gloo_pool, "dropout", one)
        arguments = (one, plans.model("dropout"), plans.VOCABULARY, 2)
        results.append(gloo_pool.run(cases.run_steps, *arguments, ranks=len(one.used_devices))[0])
    for result in results[1:]:
        np.testing.assert_allclose(result["steps"], results[0]["steps"], rtol=1e-10)
        for parameter, gradient in results[0]["gradients"].items():
            error = np.abs(result["gradients"][parameter] - gradient).max()
            assert error <= 1e-10 * np.abs(gradient).max(), parameter
    without, _ = plans.reference("gpt2", DROP)
    assert results[0]["steps"][0][0] != pytest.approx(without, rel=1e-3), "dropout does nothing"


@pytest.mark.parametrize("train_first", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        {"microbatches": 2},
        {"stages": 3, "microbatches": 4, "replicas": (1, 1)},
        {"microbatches": 2, "replicas": (1, 1), "sharded_state": "gradients"},
        {"stages": 2, "microbatches": 2, "replicas": (2, 1), "sharded_state": "parameters"},
        {"microbatches": 2, "slices": (5, 7), "replicas": (1, 1), "sharded_state": "parameters"},
        {"stages": 2, "microbatches": 2, "slices": (5, 7), "schedule": "gpipe"},
        {"stages": 4, "placement": (0, 1, 1, 0), "microbatches": 2, "schedule": "gpipe"},
        {"stages": 2, "microbatches": 2, "context": 3},
        {"microbatches": 2, "context": 2, "replicas": (1, 1), "sharded_state": "parameters"},
    ],
)
def test_an_evaluation_is_the_plain_loss_without_dropout(gloo_pool, layout, train_first):
    one = plan("dropout", DROP, **layout)
    prepare(gloo_pool, "dropout", one)
    arguments = (one, plans.model("dropout"), plans.VOCABULARY, train_first)
    found = gloo_pool.run(cases.evaluate, *arguments, ranks=len(one.used_devices))
    layers = plans.plain_layers("dropout", DROP)
    for layer in layers:
        layer.eval()
    tokens, labels, _ = cases.rows_of(one, 0, plans.VOCABULARY)
    with torch.no_grad():
        wanted = float(plans.plain_loss(layers, tokens, labels))
    assert found == pytest.approx([wanted] * len(found), rel=1e-12)


def test_a_trace_has_every_action_in_order_and_the_hook_can_slow_them(gloo_pool):
    one = plan("llama", stages=2, microbatches=4)
    prepare(gloo_pool, "llama", one)
    found = gloo_pool.run(cases.traced, one, plans.model("llama"), plans.VOCABULARY, 0.01, ranks=2)
    for rank, (spans, seen) in enumerate(found):
        words = one.order.lanes[rank].split()
        assert [span[1] for span in spans] == words == seen
        assert all(span[0] == rank for span in spans)
        starts = [span[2] for span in spans]
        assert starts == sorted(starts) and all(stop >= start for _, _, start, stop in spans)
        assert all(stop - start >= 0.01 for _, word, start, stop in spans if "F" in word and "_" not in word)
