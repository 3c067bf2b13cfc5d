"""What the planner makes of a model of several modules, run: loss and every gradient are those of one process."""

from __future__ import annotations

import numpy as np
import pytest
from tests.run.worker.test_modules import agrees, reference, run
from tests.support import modules_toys as toys
from tests.support.modules_toys import ALL

from pipefit.cluster import open_cluster
from pipefit.errors import PlanError
from pipefit.plan.assemble.packed_rows import edge_sizes, stage_grouping
from pipefit.plan.check.rules import check_plan
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.request.sampled_batches import SampledBatches
from pipefit.run.transfers.packed import TokenRuns

FIXES = (
    ("microbatches=2", "vision.replicas=3", "language.stages=2", "generator.replicas=2"),
    ("microbatches=3", "vision.replicas=2", "language.shards=2", "generator.recompute=full", "schedule=zb-h1"),
    ("microbatches=6", "vision.multiple=3", "language.shards=2", "language.stages=2", "generator.multiple=2"),
    ("microbatches=3", "vision.divide=images", "vision.replicas=3", "language.stages=2", "generator.divide=images",
     "generator.placement=shared", "language.shards=2"),
    ("microbatches=3", "modules=inline", "vision.replicas=2", "language.stages=2", "language.shards=2",
     "generator.divide=images", "schedule=1f1b"),
)  # fmt: skip


@pytest.mark.parametrize("frozen", [(), ("vision",)])
def test_planned_runs_are_exact(gloo_pool, frozen):
    model = toys.model(ALL, frozen)
    samples = known_samples()
    for fixes in FIXES[2:] if frozen else FIXES:
        plan = make_plan(model, open_cluster("local:7"), toys.JOB, parse_constraints(fixes), samples=samples)
        check_plan(plan, model)
        assert all(plan.decisions[key] == value for key, value in (fix.split("=") for fix in fixes))
        agrees(run(gloo_pool, plan, model), *reference(ALL, frozen))


@pytest.mark.parametrize("fixes", [[], ["language.shards=2"]])
def test_a_tied_embedding_behind_a_generator_is_planned_in_forms_that_its_two_uses_have_alike(gloo_pool, fixes):
    """Over shards Megatron's program splits the words in the fused head, and in the embedding."""
    model = toys.model(ALL, (), True)
    plan = make_plan(model, open_cluster("local:7"), toys.JOB, parse_constraints(fixes), samples=known_samples())
    check_plan(plan, model)
    assert plan.decisions["language.shards"] == ("2" if fixes else "1")
    agrees(run(gloo_pool, plan, model), *reference(ALL, (), True))


def test_more_shards_than_a_module_can_be_split_over_are_refused():
    fixes = parse_constraints(["language.shards=3"])
    with pytest.raises(PlanError, match=r"cannot be split over this many shards(.|\n)*language.shards(.|\n)*seen: 3"):
        make_plan(toys.model(ALL), open_cluster("local:7"), toys.JOB, fixes, samples=known_samples())


def known_samples() -> SampledBatches:
    """Those of the toys' first step."""
    counts = {space: np.array([values]) for space, values in toys.counts(ALL, 0).items()}
    squares = {space: 3 * table for space, table in counts.items()}
    images = {space: [each] for space, each in toys.images(ALL, 0).items()}
    return SampledBatches(tokens=counts, squares=squares, images=images, note="samples: toys")


@pytest.mark.parametrize("fixes", FIXES[2:])
def test_messages_are_costed_for_the_tokens_that_the_run_exchanges(fixes):
    """Of every edge between modules and every microbatch, also where several are taken together, or images divided."""
    model, space_of = toys.model(ALL), {module.name: module.space for module in toys.model(ALL).modules}
    counts = toys.counts(ALL, 0)
    plan = make_plan(model, open_cluster("local:7"), toys.JOB, parse_constraints(fixes), samples=known_samples())
    spaces, tokens = {space.name: space for space in plan.spaces}, TokenRuns(plan)
    tokens.set_counts({name: spaces[name].images for name in counts})
    seen = set()
    for edge in plan.edges:
        ends = [plan.stages[edge.source], plan.stages[edge.target]]
        packed = next((space_of[end.module] for end in ends if space_of[end.module] in counts), None)
        if packed is not None:
            ways = (stage_grouping(ends[0]), stage_grouping(ends[1]))
            groups = [plan.stage_mesh(stage) for stage in (edge.source, edge.target)]
            found = edge_sizes(spaces[packed], plan.order.microbatches, *groups, ways)
            for microbatch, (total, runs) in enumerate(found):
                assert total == tokens.token_count(packed, microbatch)
                for stage, own in zip((edge.source, edge.target), runs, strict=True):
                    assert tuple(own) == tokens.replica_runs(packed, stage, microbatch)
            seen |= {*ways}
    assert {way.multiple for way in seen} == {1, 2, 3} or {way.divide for way in seen} == {"samples", "images"}
