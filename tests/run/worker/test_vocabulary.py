"""Words split over a shard axis with uneven shares, in programs that are written so: the table of the embedding, the
head, and the loss. Loss, every gradient and the global norm are one process's, in float64.

A part of the words is counted by its own device alone in the norm, everything that all hold by one of them, and a table
that embedding and head share once: within a stage, and over two stages with other shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from tests.run.worker.test_exact import check_one_step
from tests.support import worker_plans as plans

from pipefit.cluster import local_cluster
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.errors import PlanError
from pipefit.layout import parse_form
from pipefit.plan.assemble.shard_recipes import shard_setting
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Plan
from pipefit.shard.chain import ChainSearch

pytestmark = pytest.mark.gloo


class Lane(NamedTuple):
    """Shares of a group, and how it splits the words."""

    shares: tuple[int, ...]
    embedding: str = "I>G0 vocabulary>G0/alltoallv"
    head: str = "G0>G2 d0 rms_norm_0:G0>I out"


BY_FEATURES = "I>G0 features embedding_0:G2>G0"


def by_words(name: str, lanes: Sequence[Lane], **decisions: Any) -> Plan:
    """A plan whose lanes split words so, and rows in the blocks, with programs of their own."""
    model, cluster, job = plans.model(name), local_cluster(8), plans.JOB
    context = PlannerContext(model, cluster, name=name)
    embedding, *_, head, loss = (layer.graph for layer in model.layers)
    sets = []
    for lane in lanes:
        setting = shard_setting(
            model, Network(cluster), best_costs(cluster), devices=tuple(range(len(lane.shares))),
            rows=job.batch // 2, tokens=job.sequence, precision=job.precision, microbatches=2,
        )  # fmt: skip
        chains = ChainSearch(model, setting, streams=(parse_form("G0"),), tied_whole=True)
        links = chains.search_programs(model.layers, lane.shares)
        recipes = {layer.graph: link.layer_recipe.recipe_text for layer, link in zip(model.layers, links, strict=True)}
        written = {embedding: lane.embedding, head: lane.head, loss: "G2>I vocabulary"}
        sets.append(context.programs.add_recipes(recipes | written))
    shares = tuple(lane.shares for lane in lanes)
    chosen = ParallelConfig(
        **{"stages": len(lanes), "microbatches": 2, **decisions}, sharding="searched", shards=max(shares, key=len),
        lane_shards=shares, recipes=tuple(sets),
    )  # fmt: skip
    return build_plan(model, cluster, job, chosen, name=name, context=context)


CASES: dict[str, tuple[str, Callable[[], Plan]]] = {
    "untied": ("wide", lambda: by_words("wide", [Lane((3, 2))])),
    "tied": ("tied", lambda: by_words("tied", [Lane((2, 1, 1))], recompute=("selective",))),
    "tied over 2 stages, 2 replicas, zero-1": (
        "tied", lambda: by_words("tied", [Lane((1, 2)), Lane((2, 1))], replicas=(1, 1), sharded_state="optimizer"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_norm_loss_and_every_gradient_are_those_of_one_process(gloo_pool, case):
    name, make = CASES[case]
    the_plan = make()
    words = {each.name: each for each in the_plan.parameters if each.shape[0] == plans.VOCABULARY}
    assert len(words) == (1 if name == "tied" else 2)
    assert {each.stored[1] for each in words.values()} == {"G0"}
    check_one_step(gloo_pool, the_plan, name)


def test_a_table_by_words_and_by_features_is_refused():
    """A plan knows one form of a parameter that stages share."""
    with pytest.raises(PlanError, match="stored differently by its two uses") as error:
        by_words("tied", [Lane((2, 1), embedding=BY_FEATURES), Lane((1, 2, 1))])
    assert "'G1') and ((96, 32), True, 'G0')" in error.value.full_text()
