"""Plans whose replicas divide images in place of samples: chosen where samples are few, and costed as they run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.three_modules import skewed_samples, three_modules

from benchmarks.plain_devices import plain_spec
from pipefit.errors import PlanError
from pipefit.plan.assemble.packed_rows import packed_sizes, stage_grouping
from pipefit.plan.assemble.pipeline_work import pipeline_work, skeleton_from_plan
from pipefit.plan.assemble.predict import simulate_plan
from pipefit.plan.assemble.shard_programs import ProgramCache
from pipefit.plan.check.rules import check_plan
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.request.sampled_batches import SampledBatches, StageShares, deal_samples
from pipefit.plan.types import Job, SampleArrangement, SampleLoad

JOB = Job(batch=2, sequence=4096)
CLUSTER = replace(
    plain_spec("1x4xA100-80"),
    links={name: replace(one, bandwidth_bytes_per_s=2e9) for name, one in plain_spec("1x4xA100-80").links.items()},
)
"""Four devices for two samples, with slow links: encoder and generator lose much over shards."""


def with_images(samples: SampledBatches, each: int = 100) -> SampledBatches:
    """The same, and their images of so many tokens each, the last one of what is left."""
    images = {
        space: [[(each,) * (count // each) + ((count % each,) if count % each else ()) for count in batch]
                for batch in table.tolist()]
        for space, table in samples.tokens.items()
    }  # fmt: skip
    return replace(samples, images=images)


SAMPLES = with_images(skewed_samples(2))


@pytest.mark.parametrize("frozen", [(), ("generator",)])
def test_the_search_divides_images_where_that_is_faster(frozen: tuple[str, ...]) -> None:
    model = three_modules(frozen)
    free = make_plan(model, CLUSTER, JOB, samples=SAMPLES)
    constraints = parse_constraints(["vision.divide=samples", "generator.divide=samples"])
    whole = make_plan(model, CLUSTER, JOB, constraints, samples=SAMPLES)
    check_plan(free, model, CLUSTER)
    assert free.decisions["vision.divide"] == free.decisions["generator.divide"] == "images"
    assert "vision.divide" not in whole.decisions
    assert free.prediction is not None and whole.prediction is not None
    assert free.prediction.step_s < 0.97 * whole.prediction.step_s
    assert simulate_plan(free, model, CLUSTER).timeline.makespan_s == pytest.approx(free.prediction.step_s, rel=1e-12)


@pytest.mark.parametrize("placement", ["inline", "shared", "disjoint"])
def test_more_replicas_than_samples_where_it_is_asked_for(placement: str) -> None:
    """Four of the encoder for two samples; on devices of its own, two for one microbatch of one."""
    replicas = 2 if placement == "disjoint" else 4
    constraints = [
        "vision.divide=images",
        f"vision.placement={placement}",
        f"vision.replicas={replicas}",
        "vision.shards=1",
    ]
    constraints += ["microbatches=2", "language.shards=1"] if placement == "disjoint" else ["language.shards=2"]
    constraints += ["generator.placement=inline"] if placement == "inline" else []
    model = three_modules()
    plan = make_plan(model, CLUSTER, JOB, parse_constraints(constraints), samples=SAMPLES)
    check_plan(plan, model, CLUSTER)
    number = next(index for index, stage in enumerate(plan.stages) if stage.module == "vision")
    work = pipeline_work(skeleton_from_plan(plan), ProgramCache(model)).stages[number]
    tokens = [[count for count, _ in each] for each in work.packed]
    space = next(space for space in plan.spaces if space.name == "patches")
    rows = JOB.batch // plan.order.microbatches
    for microbatch, each in enumerate(tokens):
        assert sum(each) == sum(space.counts[microbatch * rows : (microbatch + 1) * rows]) and len(each) == replicas
        assert max(each) - min(each) <= 200, "two images"
    stage = plan.stages[number]
    assert work.packed == packed_sizes(space, plan.order.microbatches, (1,) * replicas, stage_grouping(stage))


def test_images_that_are_not_those_of_the_samples() -> None:
    other = replace(SAMPLES, images=SAMPLES.select_batches(slice(1, None)).images)
    with pytest.raises(PlanError, match="do not add up to the tokens of their samples") as caught:
        make_plan(three_modules(), CLUSTER, JOB, samples=other)
    assert "'patches'" in str(caught.value.where) and "in 1 batches of images" in str(caught.value.seen)
    some = SAMPLES.select_batches(slice(1, None))
    assert some.batch_count == 1 and [*map(sum, some.images["patches"][0])] == SAMPLES.tokens["patches"][1].tolist()


def test_more_replicas_than_an_average_microbatch_has_images_if_they_are_asked_for() -> None:
    """One sample of three images for four replicas: one of them has none."""
    few = replace(
        SAMPLES,
        tokens={space: np.full((1, 2), 300) for space in SAMPLES.tokens},
        squares={space: np.full((1, 2), 30_000) for space in SAMPLES.tokens},
        images={space: [[(100, 100, 100)] * 2] for space in SAMPLES.tokens},
    )
    constraints = [
        "vision.divide=images",
        "vision.multiple=1",
        "vision.replicas=4",
        "vision.shards=1",
        "microbatches=2",
    ]
    plan = make_plan(three_modules(), CLUSTER, JOB, parse_constraints(constraints), samples=few)
    check_plan(plan, three_modules(), CLUSTER)
    number = next(index for index, stage in enumerate(plan.stages) if stage.module == "vision")
    sizes = pipeline_work(skeleton_from_plan(plan), ProgramCache(three_modules())).stages[number].packed
    assert [sorted(count for count, _ in each) for each in sizes] == [[0, 100, 100, 100]] * 2


def test_dealing_out_where_the_only_stage_that_takes_them_one_by_one_divides_images() -> None:
    shares = [StageShares((1, 1), 1, "images"), StageShares((1,), 2)]
    order = deal_samples(
        SAMPLES, 0, SampleArrangement(loads=(SampleLoad(space="patches", token_s=1.0),) * 2), shares, 2
    )
    assert sorted(order.tolist()) == [0, 1]
