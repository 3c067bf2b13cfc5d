"""Images that broke after they were indexed: runs that end for them or do without their samples, and what is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run.session.test_train_images import JOB, losses, small_model, write_index
from tests.support import modules_toys as toys
from tests.support.modules_toys import Layout
from tests.support.train_toys import command, start, train_here

from pipefit.cli.plan import _preparation_words
from pipefit.data.multimodal import feeds as feeds_module
from pipefit.data.multimodal import images as images_module
from pipefit.data.multimodal.feeds import SampleSource
from pipefit.data.multimodal.index import GENERATE, IMAGE, make_index, open_index
from pipefit.data.multimodal.sample_rows import rows_of_index
from pipefit.data.multimodal.sequence import images_of
from pipefit.data.multimodal.step import multimodal_step
from pipefit.data.preparation.cores import decoding_copies
from pipefit.data.stepplan import batch_shape
from pipefit.errors import DataError, RunError
from pipefit.plan.check.rules import save_plan
from pipefit.plan.types import Plan
from pipefit.run.checkpoint import checkpoint
from pipefit.run.config import TrainConfig, check_train_config
from pipefit.run.inputs import image_feeding as image_feeding_module
from pipefit.run.inputs.image_feeding import ImageBatchSource, open_images
from pipefit.run.session import launch as launch_module
from pipefit.run.session import train as train_module
from pipefit.run.session.launch import rank_token
from pipefit.run.session.rendezvous import World
from pipefit.run.transfers.comms import CommGroups
from pipefit.run.update.optimizer import OptimizerConfig
from pipefit.run.worker.build import build_worker
from pipefit.run.worker.evaluation import LaneEvaluation
from pipefit.show.record import read_run


def feeding(index: Path, **options: Any) -> ImageBatchSource:
    model = small_model()
    plan = toys.plan(model, dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)
    config = TrainConfig(plan="p", run_dir="r", steps=4, data=(str(index),), **{"held_out": 0, **options})
    return open_images(plan, model, check_train_config(config), 0, torch.device("cpu"))


def losses_of(index: Path, **options: Any) -> list[float]:
    """Of four steps and an evaluation on one device, in float64."""
    feeds, model = feeding(index, **options), small_model()
    plan = toys.plan(model, dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)
    worker = build_worker(plan, model, CommGroups(torch.device("cpu")), torch.device("cpu"), OptimizerConfig(lr=0.01))
    found = []
    for step in range(4):
        fed = feeds.step_inputs(step)
        found.append(float(worker.run_step(fed.feeds, step, fed.divisor, fed.counts).loss))
    fed = feeds.evaluation_inputs(0)
    sums = LaneEvaluation(worker).run_batch(fed.feeds, fed.counts)
    return [*found, float(worker.mean_loss(sums, worker.module_divisors(fed.divisor)))]


def test_training_goes_on_as_if_the_sample_were_empty(tmp_path: Path) -> None:
    """Against a manifest in which those samples have no text and no image: the loss and its divisor do without them.
    One is trained on, another one held out."""
    folders = [tmp_path / name for name in ("broken", "empty")]
    whole, indexes = losses_of(write_index(tmp_path / "whole"), held_out=2), [write_index(each) for each in folders]
    rows = (folders[1] / "manifest.jsonl").read_text().splitlines()
    for sample, kind in ((1, "image"), (6, "generate"), (12, "generate")):
        (folders[0] / next(part[kind] for part in json.loads(rows[sample])["parts"] if kind in part)).unlink()
        rows[sample] = json.dumps({"id": "empty", "parts": [{"text": ""}]})
    (folders[1] / "manifest.jsonl").write_text("\n".join(rows) + "\n")
    make_index(replace(open_index(indexes[0]).summary.request, source=str(folders[1] / "manifest.jsonl")), indexes[1])
    found = losses_of(indexes[0], held_out=2, on_broken="skip")
    assert found == losses_of(indexes[1], held_out=2)
    assert all(abs(a - b) > 1e-6 for a, b in zip(found, whole, strict=True))


@pytest.mark.slow
@pytest.mark.gloo
def test_a_run_of_four_processes_ends_or_goes_on_without_the_samples_and_so_does_its_resume(tmp_path: Path) -> None:
    """An image of the third step is gone. The run ends there with one message, and has saved its two steps; from there
    it goes on without the sample, as one process does that was told so from the first."""
    model, index = small_model(), write_index(tmp_path, samples=26)
    alone = toys.plan(model, dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)
    apart = toys.plan(
        model, dict(zip(toys.ALL, (Layout(), Layout((2, 1)), Layout()), strict=True)), microbatches=2, job=JOB
    )
    for name, plan in (("alone", alone), ("apart", apart)):
        save_plan(plan, tmp_path / f"{name}.json")
    data = ("--held-out", "2", "--lr", "0.01")
    opened, rows = open_index(index), rows_of_index(open_index(index), JOB.sequence, batch=JOB.batch, held_out=2)
    third = multimodal_step(batch_shape(alone), rows, 2).rows.tolist()
    sample = next(row for row in third if images_of(opened, rows, row, IMAGE))
    path = opened.image_path(images_of(opened, rows, sample, IMAGE)[0].image)
    path.unlink()
    four = (*data, "--local", "4", "--workers", "1")
    failed = start(command(tmp_path / "apart.json", index, tmp_path / "run", *four, steps=4))
    assert failed.returncode == 2, failed.stderr
    assert failed.stderr.count("pipefit:") == 1
    assert f"{path} (sample s{sample}, step 3)" in failed.stderr and "there is no such file" in failed.stderr
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    skip = ("--on-broken", "skip")
    code, error = train_here(tmp_path / "alone.json", index, tmp_path / "one", *data, *skip, steps=4)
    assert code == 0, error
    resume = ("--resume", str(tmp_path / "run"))
    done = start(command(tmp_path / "apart.json", index, tmp_path / "run", *four, *skip, *resume, steps=4))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in told if "broken_images" in line] == [
        {"step": 3, "broken_images": {str(path): "there is no such file"}, "samples_left_out": 1}
    ]
    assert done.stdout.count(f"among them {path}: there is no such file; samples left out so far: 1") == 1
    left_out = checkpoint.read_manifest(tmp_path / "run" / "checkpoints" / "step-00000004").extra["left_out"]
    assert left_out == [sample]


def test_a_checkpoint_keeps_what_was_left_out_though_the_image_is_whole_again(tmp_path: Path) -> None:
    """Two steps are an epoch and have met all that is broken; the files are back in their places when a run resumes."""
    index = write_index(tmp_path)
    plan = toys.plan(small_model(), dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)
    save_plan(plan, tmp_path / "plan.json")
    paths = [open_index(index).image_path(image) for image in range(8)]
    kept = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    options = ("--held-out", "2", "--lr", "0.01", "--on-broken", "skip")
    saving = ("--save-every", "2")
    code, error = train_here(tmp_path / "plan.json", index, tmp_path / "one", *options, *saving, steps=4)
    assert code == 0, error
    for path, data in zip(paths, kept, strict=True):
        path.write_bytes(data)
    resume = ("--resume", str(tmp_path / "one" / "checkpoints" / "step-00000002"))
    code, error = train_here(tmp_path / "plan.json", index, tmp_path / "on", *options, *resume, steps=4)
    assert code == 0, error
    trained = [
        [line["loss"] for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open()) if "loss" in line]
        for name in ("one", "on")
    ]
    assert len(trained[0]) == 4 and trained[0][2:] == trained[1]


def test_a_report_passes_over_what_was_said_of_images(tmp_path: Path) -> None:
    step = {"step": 1, "loss": 2.0, "step_s": 0.5}
    lines = [step, {"step": 1, "broken_images": {"a.jpg": "cut"}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = small_model()
    plan = toys.plan(model, dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)
    save_plan(plan, tmp_path / "plan.json")
    assert [each.step for each in read_run(tmp_path).steps] == [1]


def test_workers_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        check_train_config(TrainConfig(plan="p", run_dir="r", steps=1, worker_backend="threads"))  # type: ignore[arg-type]
    assert (error.value.where, error.value.seen) == ("--worker-backend", "threads")
    assert error.value.allowed == "processes or ray"


def test_a_replica_without_rows_has_no_documents_to_keep_apart(tmp_path: Path) -> None:
    """Two replicas of the language model and one row a microbatch."""
    model = small_model()
    layouts = dict(zip(toys.ALL, (Layout(), Layout((1, 1)), Layout()), strict=True))
    plan = toys.plan(model, layouts, microbatches=6, job=replace(JOB, documents="apart"))
    config = TrainConfig(plan="p", run_dir="r", steps=1, data=(str(write_index(tmp_path)),), held_out=0)
    for device in (1, 2):
        fed = open_images(plan, model, config, device, torch.device("cpu")).step_inputs(0)
        found = {len(slices[0].rows) for each in fed.feeds.values() for slices in each}
        assert found == {1 if device == 1 else 0} or found == {0 if device == 1 else 1}


CUT = {
    "vision": Layout(cuts=(1, 2, 3)),
    "language": Layout(),
    "generator": Layout(cuts=(1, 2)),
}
"""A stage for every layer of the modules of images."""


@pytest.mark.parametrize(
    ("layouts", "often"),
    [
        (dict.fromkeys(toys.ALL, Layout()), (1, 1)),
        (CUT, (1, 2)),
        ({**CUT, "vision": Layout((1, 1), (1, 2), (1, 1)), "generator": Layout(shards=(1, 1))}, (2, 2)),
    ],
    ids=["whole", "cut", "shards"],
)
def test_an_image_is_decoded_only_where_its_pixels_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layouts: dict[str, Layout], often: tuple[int, int]
) -> None:
    """By the first stage of the encoder, and by the first and the last of the generator; on every shard. What
    `decoding_copies` says is what is counted on all devices."""
    index, model, seen = write_index(tmp_path), small_model(), list[int]()
    plan = toys.plan(model, layouts, microbatches=2, job=JOB)
    config = TrainConfig(plan="p", run_dir="r", steps=1, data=(str(index),), held_out=0)
    real = feeds_module.read_patches
    monkeypatch.setattr(feeds_module, "read_patches", lambda *a: (seen.append(a[2].patch), real(*a))[1])
    for device in plan.used_devices:
        open_images(plan, model, config, device, torch.device("cpu")).step_inputs(0)
    opened, rows = open_index(index), rows_of_index(open_index(index), JOB.sequence, batch=JOB.batch)
    step = multimodal_step(batch_shape(plan), rows, 0).rows.tolist()
    for space, kind, patch, times in (("patches", IMAGE, 4, often[0]), ("latents", GENERATE, 2, often[1])):
        images = sum(len(images_of(opened, rows, row, kind)) for row in step)
        assert images and seen.count(patch) == times * images
        assert decoding_copies(plan, model)[space] == times


def test_the_planner_counts_an_image_for_every_shard_that_decodes_it(tmp_path: Path) -> None:
    model, index = small_model(), open_index(write_index(tmp_path))
    source = SampleSource(index=index, rows=rows_of_index(index, JOB.sequence, batch=JOB.batch), seed=0)
    for shards, words in (((1,), " images in steps"), ((1, 1), " images, each decoded by 2 devices, in steps")):
        plan = toys.plan(model, dict.fromkeys(toys.ALL, Layout(shards=shards)), job=JOB)
        assert words in _preparation_words(source, plan, model, 1e-3)


def test_stages_that_take_turns_decode_their_part_of_the_images() -> None:
    model = small_model()
    whole, shards = Layout((1, 1)), Layout(shards=(1, 1))
    shared = {"vision": (whole, shards), "generator": (shards, whole)}
    layouts = dict(zip(toys.ALL, (Layout(), Layout((2, 1), (2,)), Layout()), strict=True))
    plan = toys.plan(model, layouts, shared=shared, microbatches=2, order="gpipe", job=JOB)
    assert decoding_copies(plan, model) == {"patches": 1.5, "latents": 1.5}


def test_stages_without_pixels_train_as_one_stage(tmp_path: Path) -> None:
    index, model = write_index(tmp_path), small_model()
    found = []
    for layouts in (dict.fromkeys(toys.ALL, Layout()), CUT):
        plan = toys.plan(model, layouts, together=True, order="gpipe", job=JOB)
        config = TrainConfig(plan="p", run_dir="r", steps=2, data=(str(index),), held_out=0)
        feeds = open_images(plan, model, config, 0, torch.device("cpu"))
        worker = build_worker(
            plan, model, CommGroups(torch.device("cpu")), torch.device("cpu"), OptimizerConfig(lr=0.01)
        )
        fed = [feeds.step_inputs(step) for step in range(2)]
        found.append(
            [float(worker.run_step(each.feeds, n, each.divisor, each.counts).loss) for n, each in enumerate(fed)]
        )
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def alone() -> Plan:
    return toys.plan(small_model(), dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)


def test_workers_are_told_where_the_index_is_whatever_folder_they_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = write_index(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert feeding(Path("index"))._ahead.recipe.index == str(index)


def test_workers_are_told_what_decodes_images_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_feeding_module, "decoder_versions", lambda: "Pillow 1.0, numpy 1.0")
    feeds = feeding(write_index(tmp_path), workers=1)
    try:
        with pytest.raises(DataError, match="die before they have done anything") as error:
            feeds.step_inputs(0)
    finally:
        feeds.close()
    for part in (
        "other versions of the image decoders than the run",
        images_module.decoder_versions(),
        "Pillow 1.0, numpy 1.0",
    ):
        assert part in str(error.value.seen)


def test_ranks_compare_what_decodes_images(monkeypatch: pytest.MonkeyPatch) -> None:
    config, plan = TrainConfig(plan="p", run_dir="r", steps=1), alone()
    assert f", {images_module.decoder_versions()}, " in rank_token(plan, config, 0)
    text = replace(plan, stages=tuple(replace(stage, space="samples") for stage in plan.stages))
    assert "Pillow" not in rank_token(text, config, 0)
    monkeypatch.setattr(launch_module, "decoder_versions", lambda: "Pillow 1.0, numpy 1.0")
    assert ", Pillow 1.0, numpy 1.0, " in rank_token(plan, config, 0)


@pytest.mark.parametrize("what", ["build_worker", "open_run_dir", "RunLog"])
def test_a_run_that_fails_at_its_start_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    made: list[Any] = []
    real = train_module.open_images
    monkeypatch.setattr(train_module, "open_images", lambda *a: (made.append(real(*a)), made[0])[1])

    def broken(*_: Any, **__: Any) -> Any:
        raise RunError("It broke.")

    monkeypatch.setattr(train_module, what, broken)
    save_plan(alone(), tmp_path / "plan.json")
    config = TrainConfig(
        plan=str(tmp_path / "plan.json"), run_dir=str(tmp_path / "run"), steps=1, data=(str(write_index(tmp_path)),),
        held_out=0, workers=1,
    )  # fmt: skip
    with pytest.raises(RunError, match="It broke"):
        train_module.train_rank(alone(), config, World(torch.device("cpu")))
    (pool,) = [feeds._pool for feeds in made]
    assert not pool._thread.is_alive() and pool._executor.process_ids == {}
