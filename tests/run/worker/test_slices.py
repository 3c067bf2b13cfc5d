"""Sequences in slices, over processes: every schedule family, slicing and layout gives the uncut run's gradients.

In float64 to 1e-10 of each tensor's largest entry against the family's plain modules under PyTorch's autograd, which
know no slices, stages or shards; in float32 to 1e-5 against our own uncut run in one process.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import worker_cases as cases
from tests.support import worker_plans as plans

from pipefit.plan.check.rules import check_plan
from pipefit.plan.types import Job, Plan
from pipefit.schedule.families import FAMILIES

pytestmark = pytest.mark.gloo

JOB = plans.JOB
SINGLE = replace(JOB, precision="float32")
V = (0, 1, 1, 0)
UNIFORM, UNEVEN, TAIL, HEAD, ONES = (3,) * 4, (5, 4, 3), (6, 5, 1), (1, 11), (1,) * 12


@dataclass(frozen=True)
class Case:
    model: str
    schedule: str
    slices: tuple[int, ...]
    layout: dict[str, Any]

    def plan(self, job: Job) -> Plan:
        return plans.plan(self.model, job, schedule=self.schedule, slices=self.slices, **self.layout)


def case(model: str, schedule: str, slices: tuple[int, ...], microbatches: int = 2, **layout: Any) -> Case:
    return Case(model, schedule, slices, {"microbatches": microbatches, **layout})


SEQUENCE_PARALLEL = {"shards": (1, 1), "sharding": "megatron-sp"}
CASES = {
    "gpipe": case("llama", "gpipe", UNEVEN, stages=3),
    "gpipe, one-token slices": case("llama", "gpipe", ONES, stages=2),
    "1f1b, one microbatch": case("llama", "1f1b", UNIFORM, 1, stages=4),
    "1f1b, one-token tail": case("llama", "1f1b", TAIL, 4, stages=3),
    "1f1b, one-token slices": case("llama", "1f1b", ONES, 1, stages=2, recompute=("selective",)),
    "eager 1f1b": case("llama", "eager-1f1b", UNEVEN, stages=3, recompute=("full",)),
    "interleaved": case("llama", "interleaved-1f1b", UNIFORM, stages=4, placement=(0, 1, 0, 1)),
    "interleaved, more slices than lanes": case(
        "llama", "interleaved-1f1b", (2,) * 6, stages=6, placement=(0, 1, 2, 0, 1, 2), recompute=("full",)
    ),
    "zb-h1": case("llama", "zb-h1", UNEVEN, 4, stages=3),
    "zb-h1, full recomputation": case("llama", "zb-h1", TAIL, 2, stages=3, recompute=("full",)),
    "zb-h2, selective recomputation": case("llama", "zb-h2", HEAD, 4, stages=3, recompute=("selective",)),
    "1f1b-v": case("llama", "1f1b-v", UNEVEN, 2, stages=4, placement=V),
    "v-half": case("llama", "v-half", UNIFORM, 2, stages=4, placement=V, recompute=("selective",)),
    "v-min": case("llama", "v-min", UNEVEN, 2, stages=4, placement=V),
    "v-zb": case("llama", "v-zb", TAIL, 2, stages=4, placement=V, recompute=("full", "none", "selective", "none")),
    "zb-v": case("llama", "zb-v", UNEVEN, 2, stages=4, placement=V),
    "dualpipe-v": case("llama", "dualpipe-v", UNIFORM, 2, stages=4, placement=V),
    "svpp": case("llama", "svpp", UNIFORM, 2, stages=4, placement=(0, 1, 0, 1)),
    "uneven replicas, zero-1": case("llama", "1f1b", UNEVEN, stages=2, replicas=(2, 1, 1), sharded_state="optimizer"),
    "tensor shards": case("llama", "zb-h1", UNEVEN, stages=2, shards=(1, 1), sharding="megatron"),
    "uneven heads": case("wide", "1f1b", TAIL, shards=(2, 1), sharding="megatron", recompute=("full",)),
    "sequence shards": case("llama", "1f1b", (4, 6, 2), stages=2, **SEQUENCE_PARALLEL),
    "sequence shards, odd slices, zb-v": case(
        "llama", "zb-v", (5, 4, 3), stages=4, placement=V, recompute=("selective",), **SEQUENCE_PARALLEL
    ),
    "sequence shards x replicas x stages, zero-1": case(
        "tied",
        "1f1b",
        (6, 6),
        stages=2,
        replicas=(1, 1),
        sharded_state="optimizer",
        recompute=("full",),
        **SEQUENCE_PARALLEL,
    ),
    "tied, v-half": case("tied", "v-half", UNEVEN, 2, stages=4, placement=V),
    "window": case("mistral", "zb-h1", (1, 4, 7), stages=3),
    "window, one-token slices, full": case("mistral", "gpipe", ONES, 1, stages=2, recompute=("full",)),
    "window, selective, sequence shards": case(
        "mistral", "1f1b", UNEVEN, stages=2, recompute=("selective",), **SEQUENCE_PARALLEL
    ),
    "learned positions": case("gpt2", "1f1b", UNEVEN, stages=3, recompute=("full",)),
    "learned positions, v-min": case("gpt2", "v-min", UNIFORM, 2, stages=4, placement=V, recompute=("selective",)),
    "experts": case("mixtral", "zb-h1", TAIL, stages=2, recompute=("full",)),
}


def test_the_grid_has_every_family_that_is_written_by_rules():
    assert {each.schedule for each in CASES.values()} == set(FAMILIES) - {"fit"}


@lru_cache
def reference(name: str, job: Job = JOB):
    return plans.reference(name, job)


@lru_cache
def uncut(name: str, pool):
    return run(pool, plans.plan(name, SINGLE), name)


def run(pool, the_plan: Plan, name: str):
    check_plan(the_plan, plans.model(name))
    pool.run(cases.prepare, [(the_plan, plans.model(name))], True, ranks=8)
    arguments = (the_plan, plans.model(name), plans.VOCABULARY, 1, True)
    return pool.run(cases.run_steps, *arguments, ranks=len(the_plan.used_devices))[0]


def agree(found, wanted, bound: float) -> None:
    assert set(found) == set(wanted)
    for parameter, gradient in wanted.items():
        error = np.abs(found[parameter] - gradient).max() / np.abs(gradient).max()
        assert error <= bound, f"{parameter}: {error:.3g}"


def exact(pool, the_case: Case, job: Job = JOB) -> None:
    loss, gradients = reference(the_case.model, job)
    found = run(pool, the_case.plan(job), the_case.model)
    assert found["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    agree(found["gradients"], {name: value.numpy() for name, value in gradients.items()}, 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_that_of_the_uncut_sequence(gloo_pool, name):
    exact(gloo_pool, CASES[name])


APART = replace(JOB, documents="apart")
DOCUMENTS = {
    "uncut": case("llama", "1f1b", (12,), stages=2, recompute=("selective",)),
    "uncut, window, full": case("mistral", "zb-h1", (12,), stages=3, recompute=("full",)),
    "uneven replicas, zero-1": case("llama", "1f1b", UNEVEN, stages=2, replicas=(2, 1, 1), sharded_state="optimizer"),
    "sequence shards, zb-v": case("llama", "zb-v", UNEVEN, stages=4, placement=V, **SEQUENCE_PARALLEL),
    "window": case("mistral", "v-min", (3, 2, 7), stages=4, placement=V, recompute=("selective",)),
    "learned positions, one-token slices": case("gpt2", "gpipe", ONES, 1, stages=2, recompute=("full",)),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_kept_apart(gloo_pool, name):
    """As if each were a sequence of its own: the reference runs document after document, without a mask."""
    exact(gloo_pool, DOCUMENTS[name], APART)


IN_FLOAT32 = ["1f1b, one-token slices", "zb-v", "sequence shards, odd slices, zb-v", "window", "experts"]


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_float32_is_near_the_uncut_sequence(gloo_pool, name):
    the_case = CASES[name]
    wanted = uncut(the_case.model, gloo_pool)
    found = run(gloo_pool, the_case.plan(SINGLE), the_case.model)
    assert found["steps"][0] == pytest.approx(wanted["steps"][0], rel=1e-5)
    agree(found["gradients"], wanted["gradients"], 1e-5)


LAYOUTS: list[dict[str, Any]] = [
    {"stages": 3},
    {"stages": 2, "replicas": (1, 1), "sharded_state": "optimizer"},
    {"stages": 2, "shards": (1, 1), "sharding": "megatron"},
    {"stages": 4, "placement": V},
]


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_slicings_of_random_layouts(gloo_pool, data):
    cuts = data.draw(st.sets(st.integers(1, JOB.sequence - 1), min_size=1, max_size=7), label="cuts")
    layout = data.draw(st.sampled_from(LAYOUTS), label="layout")
    schedules = ("v-min", "zb-v", "1f1b-v") if "placement" in layout else ("gpipe", "1f1b", "zb-h1")
    exact(
        gloo_pool,
        case(
            data.draw(st.sampled_from(["llama", "mistral", "gpt2"]), label="model"),
            data.draw(st.sampled_from(schedules), label="schedule"),
            tuple(b - a for a, b in itertools.pairwise([0, *sorted(cuts), JOB.sequence])),
            data.draw(st.sampled_from([2, 4]), label="microbatches"),
            recompute=(data.draw(st.sampled_from(["none", "selective", "full"]), label="recompute"),),
            **layout,
        ),
    )
