"""A worker whose parameters are stored split and gathered for use (FSDP), and whose experts are split: loss, every
gradient, the norm, and parameters after some steps are one process's, also after a checkpoint that another plan reads.
Uneven shares, float64."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.run.worker.test_exact import cases_of, one_process, reference
from tests.run.worker.test_state import interrupted, uninterrupted
from tests.support import worker_plans as plans

from pipefit.cluster import local_cluster
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.errors import StalePlanError
from pipefit.layout import parse_form
from pipefit.plan.assemble.shard_recipes import shard_setting
from pipefit.plan.check.rules import check_plan
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.run.worker.build import stage_programs
from pipefit.shard.chain import ChainSearch

pytestmark = pytest.mark.gloo

SHARES = (2, 1)
BYTE_S = 1e-7
"""What a byte that stays on a device costs in these searches: rows stay split, and parameters are gathered."""


def gathered(name, shares=SHARES, edit=lambda recipe: recipe, microbatches=2, **decisions):
    """A plan of one stage that works by rows, and the words of its recipes. `edit` changes a recipe's text."""
    model, cluster, job = plans.model(name), local_cluster(8), plans.JOB
    context = PlannerContext(model, cluster, name=name)
    setting = shard_setting(
        model, Network(cluster), best_costs(cluster), devices=tuple(range(len(shares))), rows=job.batch // microbatches,
        tokens=job.sequence, precision=job.precision, microbatches=microbatches,
    )  # fmt: skip
    chains = ChainSearch(model, setting, byte_price_s=BYTE_S, streams=(parse_form("G0"),), tied_whole=True)
    links = chains.search_programs(model.layers, shares)
    recipes = {
        layer.graph: edit(link.layer_recipe.recipe_text) for layer, link in zip(model.layers, links, strict=True)
    }
    chosen = ParallelConfig(
        stages=1, microbatches=microbatches, replicas=(1,), sharding="searched", shards=shares, lane_shards=(shares,),
        recipes=(context.programs.add_recipes(recipes),), **decisions,
    )  # fmt: skip
    words = [word for text in recipes.values() for word in text.split()]
    return build_plan(model, cluster, job, chosen, name=name, context=context), words


@pytest.mark.parametrize(("name", "recompute"), [("wide", "full"), ("mixtral", "selective")])
def test_gathered_parameters_train_like_whole_ones(gloo_pool, name, recompute):
    plan, words = gathered(name, recompute=(recompute,))
    check_plan(plan)
    stored = {word.partition(":")[0] for word in words if "weight:G" in word or "proj:G" in word}
    assert len(stored) >= 5, "parameters are stored split and gathered for use"
    loss, gradients = reference(name)
    found = cases_of(gloo_pool, plan, name, 1)
    assert found["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    norm = sum(float((g**2).sum()) for g in gradients.values()) ** 0.5
    assert found["steps"][0][1] == pytest.approx(norm, rel=1e-11)
    for parameter, gradient in gradients.items():
        wanted = gradient.numpy()
        error = np.abs(found["gradients"][parameter] - wanted).max()
        assert error <= 1e-10 * np.abs(wanted).max(), f"{parameter}: {error / np.abs(wanted).max():.3g}"


def test_parameters_agree_after_some_steps(gloo_pool):
    found, wanted = cases_of(gloo_pool, gathered("wide")[0], "wide", 3), one_process("wide", gloo_pool)
    np.testing.assert_allclose(found["steps"], wanted["steps"], rtol=1e-10)
    for parameter, value in wanted["parameters"].items():
        error = np.abs(found["parameters"][parameter] - value).max()
        assert error <= 1e-9 * np.abs(value).max(), f"{parameter}: {error}"


RESUMES = {
    "split, other shares": ("wide", lambda: gathered("wide")[0], lambda: gathered("wide", shares=(1, 2))[0]),
    "split, then one process": ("wide", lambda: gathered("wide")[0], lambda: plans.plan("wide", microbatches=1)),
    "replicas, then split": (
        "wide", lambda: plans.plan("wide", microbatches=2, replicas=(2, 1), sharded_state="optimizer"),
        lambda: gathered("wide", shares=(1, 1, 1))[0],
    ),
    "split, then heads and columns": (
        "wide", lambda: gathered("wide")[0], lambda: plans.plan("wide", shards=(1, 2), sharding="megatron"),
    ),
    "experts, then one process": ("mixtral", lambda: gathered("mixtral")[0], lambda: plans.plan("mixtral")),
    "one process, then experts": ("mixtral", lambda: plans.plan("mixtral"), lambda: gathered("mixtral")[0]),
}  # fmt: skip


@pytest.mark.parametrize("case", RESUMES)
def test_what_was_saved_split_goes_on_in_another_way(gloo_pool, tmp_path, case):
    """Parameters and the optimizer's state, after two steps under one plan; two more under the other."""
    name, before, after = RESUMES[case]
    resumed = interrupted(gloo_pool, tmp_path, name, before(), after())
    straight = uninterrupted(gloo_pool, name, plans.plan(name, microbatches=1))
    np.testing.assert_allclose(resumed["steps"], straight["steps"], rtol=1e-10)
    for parameter, value in straight["parameters"].items():
        error = np.abs(resumed["parameters"][parameter] - value).max()
        assert error <= 1e-10 * np.abs(value).max(), f"{parameter}: {error / np.abs(value).max():.3g}"


@pytest.mark.parametrize("name", ["wide", "mixtral"])
def test_what_was_saved_split_goes_on_bit_equal_under_the_same_plan(gloo_pool, tmp_path, name):
    plan = gathered(name)[0]
    resumed, straight = interrupted(gloo_pool, tmp_path, name, plan, plan), uninterrupted(gloo_pool, name, plan)
    assert resumed["steps"] == straight["steps"]
    for parameter, value in straight["parameters"].items():
        assert np.array_equal(resumed["parameters"][parameter], value), parameter


def test_another_recipe_is_another_program():
    """Every rank writes its program from the plan's recipes and holds it against the plan's hash."""
    plan = gathered("wide")[0]
    stage_programs(plan, plans.model("wide"))
    key = next(key for key, text in plan.recipes.items() if "mlp.up_proj.weight:G0>I" in text)
    changed = re.sub(r"mlp\.up_proj\.weight:G0>I\S* ", "", plan.recipes[key])
    with pytest.raises(StalePlanError, match="made for another program of this stage") as error:
        stage_programs(replace(plan, recipes={**plan.recipes, key: changed}), plans.model("wide"))
    assert "stages[0].program" in error.value.full_text()
