"""Plans whose shard programs are searched: what the search is told, memory over several stages, and mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.plan_toys import toy_cluster, toy_model

from pipefit.cluster import Cluster
from pipefit.cost.comm.network import Network
from pipefit.cost.compute.curves import best_costs
from pipefit.cost.static_memory import WORKSPACE_BYTES
from pipefit.errors import PlanError
from pipefit.plan.assemble.shard_recipes import (
    RecipeRequest,
    recipe_chains,
    request_from_constraints,
    searched_recipes,
    shard_setting,
)
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.types import Job
from pipefit.shard.chain import ChainSearch
from pipefit.shard.synthesize import leanest_program, synthesize_program

JOB = Job(batch=16, sequence=64, precision="float32")
SEARCHED = ("sharding=searched", "shards=2")


@pytest.mark.parametrize(
    ("fixes", "expected"),
    [
        ((), {"rows": 1, "microbatches": 16, "lanes": 4, "devices": (0, 1)}),
        (("replicas=2",), {"rows": 1, "microbatches": 8, "lanes": 2}),
        (("replicas=2:1", "microbatches=4"), {"rows": 1, "microbatches": 4, "lanes": 2}),
        (("replicas=2", "microbatches=2", "stages=1"), {"rows": 4, "microbatches": 2, "lanes": 1}),
        (("cuts=2,4",), {"lanes": 3}),
        (("stages=6",), {"lanes": 4}),
        (("placement=0,1,1,0",), {"lanes": 2}),
        (("mapping=5,3,1,0",), {"devices": (5, 3)}),
        (("mapping=5",), {"devices": (0, 1)}),
        (("mapping=0,8",), {"devices": (0, 1)}),
    ],
)
def test_what_the_pins_say_of_the_programs(fixes: tuple[str, ...], expected: dict[str, object]) -> None:
    asked = request_from_constraints(parse_constraints((*SEARCHED, *fixes)), JOB, 8)
    assert {name: getattr(asked, name) for name in expected} == expected


def small(cluster: Cluster, memory_bytes: float) -> Cluster:
    return replace(
        cluster, kinds={name: replace(kind, memory_bytes=int(memory_bytes)) for name, kind in cluster.kinds.items()}
    )


def test_a_device_need_not_hold_the_layers_of_other_stages() -> None:
    """Two devices are too small for all layers: alone they are refused; as one group of four they get the programs of
    devices with four times the room."""
    model, cluster = toy_model(), toy_cluster(devices=8)
    module = model.modules[0]

    def chains(memory_bytes: float, lanes: int) -> ChainSearch:
        network = Network(small(cluster, memory_bytes))
        where = {"devices": (0, 1), "rows": 1, "tokens": 64, "precision": "float32", "microbatches": 16}
        return ChainSearch(model, shard_setting(model, network, best_costs(cluster), lanes=lanes, **where))

    least = max(leanest_program(chains(WORKSPACE_BYTES + 1, 1), module.layers, (1, 1)).held_bytes)
    assert least > 1
    scarce = WORKSPACE_BYTES + 0.3 * least
    with pytest.raises(PlanError, match="No program of these layers fits"):
        synthesize_program(chains(scarce, 1), module.layers, (1, 1))
    found = synthesize_program(chains(scarce, 4), module.layers, (1, 1))
    whole = synthesize_program(chains(WORKSPACE_BYTES + 4 * (scarce - WORKSPACE_BYTES), 1), module.layers, (1, 1))
    assert [link.layer_recipe.recipe_text for link in found.links] == [
        link.layer_recipe.recipe_text for link in whole.links
    ]
    asked = RecipeRequest(shares=(1, 1), devices=(0, 1), rows=1, microbatches=16, lanes=1)
    network = Network(small(cluster, scarce))
    recipes = searched_recipes(recipe_chains(model, network, best_costs(cluster), JOB, asked), module, asked)
    assert recipes.keys() == {layer.graph for layer in module.layers}, "the planner says whether a plan fits"


@pytest.mark.parametrize(
    ("fixes", "words"),
    [
        (("shards=16",), ("more devices than the cluster has", "at most 8")),
        (("shards=2", "mapping=0,9"), ("different devices of the cluster", "where: --fix mapping")),
        (("shards=2", "mapping=0"), ("uses this number of devices", "where: --fix mapping")),
        (("shards=2000:1",), ("A sequence is shorter than its shards need", "sequences of 1001 tokens")),
    ],
)
def test_mistakes_are_told(fixes: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(toy_model(), toy_cluster(devices=8), JOB, parse_constraints(("sharding=searched", *fixes)))
    for word in words:
        assert word in str(caught.value)
