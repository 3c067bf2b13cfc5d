"""Who takes which samples of a batch: the planner simulates what a run does, and either half can be switched off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.three_modules import three_modules

from pipefit.cluster import parse_spec
from pipefit.codec import dump_text
from pipefit.data.multimodal.images import ImageRule
from pipefit.data.multimodal.index import IndexRequest, make_index, open_index
from pipefit.data.multimodal.planning import arranged_samples, sample_batches
from pipefit.data.multimodal.sample_rows import SampleRows, rows_of_index
from pipefit.data.multimodal.step import multimodal_step
from pipefit.plan.check.rules import load_plan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.make import make_plan
from pipefit.plan.modules.search import ModuleSearch
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.request.sampled_batches import complete_samples
from pipefit.plan.types import Job, Plan

JOB = Job(batch=16, sequence=512)
BATCHES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an index of images of very different sizes, and the model."""
    image = pytest.importorskip("PIL.Image")
    found, draw = tmp_path_factory.mktemp("arranging"), np.random.default_rng(4)
    (found / "images").mkdir()
    for number in range(64):
        width = 2 * int(np.clip(draw.lognormal(2.5, 1.0), 1, 200))
        image.new("RGB", (width, 4)).save(found / "images" / f"{number:02}.png")
        (found / "images" / f"{number:02}.txt").write_text("a picture")
    make_index(IndexRequest(source=str(found / "images"), images=ImageRule(patch=2)), found / "index")
    (found / "model.json").write_text(dump_text(three_modules()))
    return found


def rows_in(folder: Path) -> SampleRows:
    return rows_of_index(open_index(folder / "index"), JOB.sequence, batch=JOB.batch, images=True)


def made(rows: SampleRows, *fixes: str, frozen: tuple[str, ...] = ()) -> Plan:
    samples = sample_batches(rows, JOB.batch, BATCHES, JOB.seed)
    cluster, constraints = parse_spec("8xA100-80"), parse_constraints(fixes)
    return make_plan(three_modules(frozen), cluster, JOB, constraints, samples=samples, arrange=arranged_samples)


PIPELINE = ("microbatches=8", "language.stages=3", "language.replicas=1", "vision.shards=1", "language.shards=1")
SHARED = ("microbatches=8", "language.stages=2", "language.replicas=2", "language.shards=1")


@pytest.mark.parametrize(
    ("fixes", "frozen"),
    [
        ((*PIPELINE, "modules=disjoint", "schedule=1f1b"), ()),
        ((*PIPELINE, "modules=disjoint", "schedule=zb-h1"), ()),
        ((*PIPELINE, "modules=disjoint", "schedule=eager-1f1b"), ("vision",)),
        ((*PIPELINE, "modules=inline", "schedule=1f1b"), ()),
        ((*PIPELINE, "modules=inline", "schedule=zb-h1"), ("vision",)),
        ((*SHARED, "modules=shared"), ()),
        ((*SHARED, "modules=shared", "vision.multiple=2", "vision.shards=1"), ("language",)),
    ],
)
def test_the_batch_that_is_shown_stands_as_in_the_first_step_of_the_run(
    folder: Path, fixes: tuple[str, ...], frozen: tuple[str, ...]
) -> None:
    """The same tokens at every position, for the order of actions that the plan has, whatever it is."""
    rows = rows_in(folder)
    plan = made(rows, *fixes, "order=true", frozen=frozen)
    assert plan.arranging is not None and plan.arranging.balance and plan.arranging.order
    shown = {space.name: list(space.counts) for space in plan.spaces}
    assert multimodal_step(plan, rows, 0).counts["patches"].tolist() == shown["patches"]
    as_it_is = made(rows, *fixes, "order=false", frozen=frozen)
    assert as_it_is.arranging is not None and not as_it_is.arranging.order
    assert sorted(as_it_is.spaces[1].counts) == sorted(shown["patches"]), "the batch keeps its samples"
    assert multimodal_step(as_it_is, rows, 0).counts["patches"].tolist() == list(as_it_is.spaces[1].counts)


@pytest.mark.parametrize("placement", ["disjoint", "inline", "shared"])
def test_every_batch_is_simulated_in_the_order_that_the_plan_has(folder: Path, placement: str) -> None:
    """And whether microbatches are put in order is what is faster on average: not always so, but where it is chosen."""
    samples = complete_samples(sample_batches(rows_in(folder), JOB.batch, BATCHES, JOB.seed), three_modules(), JOB)
    constraints = parse_constraints([*(SHARED if placement == "shared" else PIPELINE), f"modules={placement}"])
    finder = ModuleSearch(
        PlannerContext(three_modules(), parse_spec("8xA100-80")), JOB, constraints, samples, arranged_samples
    )
    finder.run_search()
    best = finder.trials.fitting[0]
    mean_s, order, before = finder.settled[id(best)]
    each = {way: finder.trials.on_all(before, way) for way in (False, True)}
    means_s = {way: np.mean([one.step_s for one in own]) for way, own in each.items()}
    assert means_s[order] == mean_s == min(means_s.values())
    written = best.simulation.timeline.schedule.lanes
    assert all(one.simulation.timeline.schedule.lanes == written for own in each.values() for one in own)
    if placement != "shared":
        assert means_s[True] < means_s[False], "a pipeline with very different microbatches gains by their order"


def test_balancing_and_ordering_are_switched_off_from_the_command_line(
    folder: Path, tmp_path: Path, pipefit: Callable[..., tuple[int, str, str]]
) -> None:
    words = ["plan", "--model", str(folder / "model.json"), "--batch", "16", "--seq", "512", "--cluster", "8xA100-80",
             "--data", str(folder / "index")]  # fmt: skip
    words += [word for fix in (*PIPELINE, "modules=disjoint", "schedule=1f1b") for word in ("--fix", fix)]

    def planned(*fixes: str) -> tuple[Plan, str]:
        code, out, error = pipefit(
            *words, *(word for fix in fixes for word in ("--fix", fix)), "-o", str(tmp_path / "p")
        )
        assert code == 0, error
        return load_plan(tmp_path / "p"), out

    rows = rows_in(folder)
    as_it_comes = sample_batches(rows, JOB.batch, 1, JOB.seed).tokens["patches"][0].tolist()
    steps = {}
    for balance in ("true", "false"):
        for order in ("true", "false"):
            plan, out = planned(f"balance={balance}", f"order={order}")
            assert plan.arranging is not None and plan.prediction is not None
            assert (plan.arranging.balance, plan.arranging.order) == (balance == "true", order == "true")
            assert f"samples: {'balanced' if plan.arranging.balance else 'as they come'}" in " ".join(out.split())
            steps[balance, order] = plan.prediction.step_s
            if (balance, order) == ("false", "false"):
                assert list(plan.spaces[1].counts) == as_it_comes
                assert multimodal_step(plan, rows, 0).counts["patches"].tolist() == as_it_comes
    assert min(steps.values()) < steps["false", "false"]
    code, _, error = pipefit(*words, "--fix", "order=perhaps")
    assert code == 2 and "This is not a valid value for 'order'." in error and "true or false" in error
