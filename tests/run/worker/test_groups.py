"""Stages held by groups of different sizes, shares and programs: loss, every gradient and the norm are one process's.

The hidden state crosses between groups in different forms: whole, by rows, by tokens. In float64, 1e-10,
with split backwards, recomputation, ZeRO-1, tied embeddings, biases in row-parallel layers, dropout on replicated
tensors and slices; and checkpoints that are saved under one sharding and resumed under another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.run.worker.test_exact import cases_of, check_one_step, one_process
from tests.support import worker_plans as plans

from pipefit.cluster import local_cluster
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.layout import parse_form
from pipefit.plan.assemble.shard_recipes import shard_setting
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Plan
from pipefit.shard.chain import ChainSearch

pytestmark = pytest.mark.gloo


def grouped(name: str, lanes: Sequence[tuple[tuple[int, ...], str]], replicas: int = 1, **decisions: Any) -> Plan:
    """A plan whose lanes have these shares and hold the hidden state in these forms, each with a program of its own."""
    model, cluster, job = plans.model(name), local_cluster(8), plans.JOB
    context = PlannerContext(model, cluster, name=name)
    count = decisions.get("microbatches", 2)
    sets = []
    for shares, form in lanes:
        if len(shares) == 1:
            sets.append("")
            continue
        setting = shard_setting(
            model, Network(cluster), best_costs(cluster), devices=tuple(range(len(shares))),
            rows=job.batch // count // replicas, tokens=job.sequence, precision=job.precision, microbatches=count,
        )  # fmt: skip
        chains = ChainSearch(model, setting, streams=(parse_form(form),), tied_whole=True)
        links = chains.search_programs(model.layers, shares)
        sets.append(
            context.programs.add_recipes(
                {a.graph: b.layer_recipe.recipe_text for a, b in zip(model.layers, links, strict=True)}
            )
        )
    shares = tuple(shares for shares, _ in lanes)
    chosen = ParallelConfig(
        **{"stages": len(lanes), "microbatches": count, **decisions}, replicas=(1,) * replicas, sharding="searched",
        shards=max(shares, key=len), lane_shards=shares, recipes=tuple(sets),
    )  # fmt: skip
    return build_plan(model, cluster, job, chosen, name=name, context=context)


ONE, TWO, UNEVEN, THREE = (1,), (1, 1), (2, 1), (2, 1, 1)

CASES: dict[str, tuple[str, Callable[[], Plan]]] = {
    "1 to 3, rows": ("wide", lambda: grouped("wide", [(ONE, "I"), (THREE, "G0")])),
    "3 to 1, whole": ("wide", lambda: grouped("wide", [(THREE, "I"), (ONE, "I")])),
    "tokens to rows": ("wide", lambda: grouped("wide", [(UNEVEN, "G1"), (THREE, "G0")])),
    "rows to tokens, groups of one size": ("wide", lambda: grouped("wide", [(UNEVEN, "G0"), (TWO, "G1")])),
    "whole to tokens to one": ("wide", lambda: grouped("wide", [(TWO, "I"), (THREE, "G1"), (ONE, "I")])),
    "whole to whole, replicas, zero-1": (
        "wide", lambda: grouped("wide", [(TWO, "I"), (TWO, "I")], replicas=2, sharded_state="optimizer"),
    ),
    "rows to tokens, I and W apart": (
        "wide", lambda: plans.zero_bubble_like(grouped("wide", [(THREE, "G0"), (UNEVEN, "G1")], microbatches=2)),
    ),
    "tied, tokens to rows, full recomputation": (
        "tied", lambda: grouped("tied", [(UNEVEN, "G1"), (TWO, "G0")], recompute=("full",)),
    ),
    "gpt2, biases, tokens to rows, selective recomputation": (
        "gpt2", lambda: grouped("gpt2", [(UNEVEN, "G1"), (THREE, "G0")], recompute=("selective", "none")),
    ),
    "tokens to rows, slices": ("wide", lambda: grouped("wide", [(UNEVEN, "G1"), (THREE, "G0")], slices=(5, 4, 3))),
    "mixtral, rows to one": ("mixtral", lambda: grouped("mixtral", [(THREE, "G0"), (ONE, "I")])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_are_those_of_one_process(gloo_pool, case):
    name, make = CASES[case]
    check_one_step(gloo_pool, make(), name)


def test_parameters_agree_after_some_steps(gloo_pool):
    name, make = CASES["tied, tokens to rows, full recomputation"]
    found, wanted = cases_of(gloo_pool, make(), name, 3), one_process(name, gloo_pool)
    np.testing.assert_allclose(found["steps"], wanted["steps"], rtol=1e-10)
    for parameter, value in wanted["parameters"].items():
        error = np.abs(found["parameters"][parameter] - value).max()
        assert error <= 1e-9 * np.abs(value).max(), f"{parameter}: {error}"


def test_messages_need_no_tags(gloo_pool):
    name, make = CASES["tokens to rows"]
    found = cases_of(gloo_pool, make(), name, 2, tagged=False)
    assert found["steps"] == cases_of(gloo_pool, make(), name, 2)["steps"]
