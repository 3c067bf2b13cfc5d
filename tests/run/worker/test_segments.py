"""A worker whose layers have shares of their own: loss, every gradient and parameters after some steps are one
process's, from a plan that says them; float64. A plan whose shares do not meet is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.run.worker.test_exact import cases_of, one_process, reference
from tests.support import worker_plans as plans

from pipefit.cluster import local_cluster
from pipefit.codec import to_data
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.errors import PlanError
from pipefit.layout import parse_form
from pipefit.plan.assemble.pipeline_work import pipeline_work, skeleton_from_plan
from pipefit.plan.assemble.shard_programs import ProgramCache
from pipefit.plan.assemble.shard_recipes import shard_setting
from pipefit.plan.check.rules import check_plan
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.shard.chain import ChainSearch, with_shares
from pipefit.shard.recipe import parse_recipe

pytestmark = pytest.mark.gloo

SHARES = (2, 1)


def segmented(name, first, last, form="G0"):
    """A plan of one stage whose first layer, and whose last two, have shares of their own."""
    model, cluster, job = plans.model(name), local_cluster(8), plans.JOB
    context = PlannerContext(model, cluster, name=name)
    setting = shard_setting(
        model, Network(cluster), best_costs(cluster), devices=(0, 1), rows=job.batch // 2, tokens=job.sequence,
        precision=job.precision, microbatches=2,
    )  # fmt: skip
    own = (first, *(SHARES,) * (len(model.layers) - 3), last, last)
    chains = ChainSearch(model, setting, streams=(parse_form(form),))
    links = with_shares(model.layers, chains.search_programs(model.layers, SHARES, own), own, SHARES)
    recipes = {layer.graph: link.layer_recipe.recipe_text for layer, link in zip(model.layers, links, strict=True)}
    chosen = ParallelConfig(
        stages=1, microbatches=2, replicas=(1,), sharding="searched", shards=SHARES, lane_shards=(SHARES,),
        recipes=(context.programs.add_recipes(recipes),),
    )  # fmt: skip
    return build_plan(model, cluster, job, chosen, name=name, context=context), model


@pytest.mark.parametrize(("name", "form"), [("wide", "G0"), ("llama", "G1")])
def test_layers_with_shares_of_their_own_train_like_one_process(gloo_pool, name, form):
    plan, _ = segmented(name, (1, 3), (1, 1), form)
    check_plan(plan)
    texts = list(plan.recipes.values())
    assert sum(" @" in text for text in texts) >= 2
    loss, gradients = reference(name)
    found = cases_of(gloo_pool, plan, name, 1)
    assert found["steps"][0][0] == pytest.approx(loss, rel=1e-12)
    for parameter, gradient in gradients.items():
        wanted = gradient.numpy()
        error = np.abs(found["gradients"][parameter] - wanted).max()
        assert error <= 1e-10 * np.abs(wanted).max(), f"{parameter}: {error / np.abs(wanted).max():.3g}"


def test_parameters_agree_after_some_steps(gloo_pool):
    found, wanted = cases_of(gloo_pool, segmented("wide", (1, 3), (1, 1))[0], "wide", 3), one_process("wide", gloo_pool)
    np.testing.assert_allclose(found["steps"], wanted["steps"], rtol=1e-10)
    for parameter, value in wanted["parameters"].items():
        error = np.abs(found["parameters"][parameter] - value).max()
        assert error <= 1e-9 * np.abs(value).max(), f"{parameter}: {error}"


def test_shares_that_do_not_meet_are_refused():
    plan, model = segmented("wide", (1, 3), (1, 1))
    key, text = next((key, text) for key, text in plan.recipes.items() if " @" in text and text.startswith("I>"))
    recipe = parse_recipe(text)
    _, own, _ = recipe.shares
    wrong = replace(recipe, shares=(own, own, own)).recipe_text
    bad = replace(plan, recipes={**plan.recipes, key: wrong})
    with pytest.raises(PlanError, match=r"hidden state by other shares(.|\n)*stages\[0\], layer 1(.|\n)*2:1(.|\n)*1:3"):
        pipeline_work(skeleton_from_plan(bad), ProgramCache(model, bad.recipes))
    assert to_data(plan)["recipes"][key] == text
