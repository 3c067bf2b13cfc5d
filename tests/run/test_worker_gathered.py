"""A worker whose parameters are stored split and gathered for use (FSDP), and whose experts are split: loss, every
gradient, the norm, and parameters after some steps are one process's. Uneven shares, float64."""

from __future__ import annotations

import numpy as np
import pytest
import worker_plans as plans
from test_worker_exact import cases_of, one_process, reference

from pipefit.cluster import local
from pipefit.cost.curves import best_costs
from pipefit.cost.network import Network
from pipefit.layout import parse_form
from pipefit.plan.build import Workbench, build_plan
from pipefit.plan.check import check_plan
from pipefit.plan.decisions import Decisions
from pipefit.plan.searched import setting_of
from pipefit.shard.chain import Chains

pytestmark = pytest.mark.gloo

SHARES = (2, 1)
BYTE_S = 1e-7
"""What a byte that stays on a device costs in these searches: rows stay split, and parameters are gathered."""


def gathered(name, shares=SHARES, edit=lambda recipe: recipe, **decisions):
    """A plan of one stage that works by rows, and the words of its recipes. `edit` changes a recipe's text."""
    model, cluster, job = plans.model(name), local(8), plans.JOB
    bench = Workbench(model, cluster, name=name)
    setting = setting_of(
        model, Network(cluster), best_costs(cluster), devices=tuple(range(len(shares))), rows=job.batch // 2,
        tokens=job.sequence, precision=job.precision, microbatches=2,
    )  # fmt: skip
    chains = Chains(model, setting, byte_price_s=BYTE_S, streams=(parse_form("G0"),), tied_whole=True)
    links = chains.search(model.layers, shares)
    recipes = {layer.graph: edit(link.recipe.text) for layer, link in zip(model.layers, links, strict=True)}
    chosen = Decisions(
        stages=1, microbatches=2, replicas=(1,), sharding="searched", shards=shares, lane_shards=(shares,),
        recipes=(bench.programs.add(recipes),), **decisions,
    )  # fmt: skip
    words = [word for text in recipes.values() for word in text.split()]
    return build_plan(model, cluster, job, chosen, name=name, bench=bench), words


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
