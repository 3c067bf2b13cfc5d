"""`pipefit train` with a multimodal plan: samples of an index, modules on processes of their own, resumed elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import modules_toys as toys
from tests.support.modules_toys import Layout
from tests.support.multimodal_toys import mixed_manifest
from tests.support.train_toys import command, start, train_here

from pipefit.data.multimodal.images import ImageRule
from pipefit.data.multimodal.index import IndexRequest, make_index
from pipefit.errors import DataError, PlanError
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import describe_config
from pipefit.plan.check.rules import save_plan
from pipefit.plan.types import Job
from pipefit.run.config import TrainConfig
from pipefit.run.inputs.image_feeding import open_images
from pipefit.run.verify.verify import measure_rank, random_batch_source

JOB = Job(batch=6, sequence=96, precision="float64", seed=3)
CONFIG: dict[str, Any] = toys.CONFIG | {
    "vision": toys.CONFIG["vision"] | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4,
                                       "num_channels": 3},
    "language": toys.CONFIG["language"] | {"vocab_size": 272},
    "generator": toys.CONFIG["generator"] | {"latent_size": 12},
}  # fmt: skip


@lru_cache
def small_model() -> Model:
    described = describe_config(CONFIG, "multimodal", "config")
    return capture_family(described.family, described.config)


def write_index(folder: Path, patch: int = 4, samples: int = 14) -> Path:
    folder.mkdir(exist_ok=True)
    request = IndexRequest(
        source=str(mixed_manifest(folder, samples)),
        images=ImageRule(patch=patch, max_patches=12),
        generated=ImageRule(patch=2, max_patches=6),
    )
    make_index(request, folder / "index")
    return folder / "index"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    kept = [line for line in lines_of(folder) if line.keys() & {"loss", "eval_loss"}]
    return [line.get("loss", line.get("eval_loss")) for line in kept]


def norms(folder: Path) -> list[float]:
    return [line["grad_norm"] for line in lines_of(folder) if "grad_norm" in line]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_process_and_four_train_alike_and_go_on_from_each_other(tmp_path: Path) -> None:
    model, index = small_model(), write_index(tmp_path)
    alone = toys.plan(model, dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)
    apart = toys.plan(
        model, dict(zip(toys.ALL, (Layout(), Layout((2, 1)), Layout()), strict=True)), microbatches=2, job=JOB
    )
    for name, plan in (("alone", alone), ("apart", apart)):
        save_plan(plan, tmp_path / f"{name}.json")
    data = ("--held-out", "2", "--lr", "0.01", "--eval-batches", "2")
    code, error = train_here(tmp_path / "alone.json", index, tmp_path / "one", *data, steps=4)
    assert code == 0, error
    four = (*data, "--local", "4", "--save-every", "2", "--workers", "1")
    done = start(command(tmp_path / "apart.json", index, tmp_path / "four", *four, steps=4))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    resumed = ("--resume", str(tmp_path / "four" / "checkpoints" / "step-00000002"))
    code, error = train_here(tmp_path / "alone.json", index, tmp_path / "on", *data, *resumed, steps=4)
    assert code == 0, error
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "one")[2:], rel=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modules_that_take_turns_train_as_one_process_with_clipped_gradients(tmp_path: Path) -> None:
    model, index = small_model(), write_index(tmp_path)
    alone = toys.plan(model, dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)
    pair, shards = Layout((1, 1)), Layout(shards=(1, 1))
    shared = toys.plan(
        model,
        dict(zip(toys.ALL, (Layout(), Layout((2, 1), (2,)), Layout()), strict=True)),
        shared={"vision": (pair, shards), "generator": (shards, pair)},
        microbatches=2,
        order="gpipe",
        job=JOB,
    )
    for name, plan in (("alone", alone), ("shared", shared)):
        save_plan(plan, tmp_path / f"{name}.json")
    options = ("--held-out", "2", "--lr", "0.01", "--eval-batches", "2", "--max-norm", "0.1")
    code, error = train_here(tmp_path / "alone.json", index, tmp_path / "one", *options, steps=4)
    assert code == 0, error
    done = start(command(tmp_path / "shared.json", index, tmp_path / "four", *options, "--local", "4", steps=4))
    assert done.returncode == 0, done.stderr
    assert min(norms(tmp_path / "one")) > 0.1, "nothing was clipped"
    assert norms(tmp_path / "four") == pytest.approx(norms(tmp_path / "one"), rel=1e-9)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)


def test_verify_runs_every_rank_alone_on_random_images_of_the_planned_counts() -> None:
    names = ("vision", "language", "generator")
    model, counts = toys.model(names), toys.counts(names, 0)
    plan = toys.plan(model, dict(zip(names, (Layout((1, 1)), Layout(), Layout()), strict=True)))
    with pytest.raises(PlanError, match=r"does not say how many tokens its samples have(.|\n)*--data INDEX"):
        random_batch_source(plan, model, 0, torch.device("cpu"))
    spaces = tuple(replace(space, counts=tuple(counts.get(space.name, ()))) for space in plan.spaces)
    plan = replace(plan, spaces=spaces)
    measured = [measure_rank(plan, model, rank, torch.device("cpu"), steps=1) for rank in range(4)]
    assert min(one.train for one in measured) > 0
    assert measured[2].train > measured[3].train, "the language model has a sequence to keep, the generator few tokens"


def test_data_that_is_no_index_or_one_for_another_model(tmp_path: Path) -> None:
    model = small_model()
    plan = toys.plan(model, dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)
    (tmp_path / "text.txt").write_text("a")
    blind = replace(model, modules=(replace(model.modules[0], space="samples"), *model.modules[1:]))
    for data, its_model, words in (
        (tmp_path / "text.txt", model, ("This is no index of samples, or a damaged one.", "pipefit data MANIFEST")),
        ("stdlib", model, ("A multimodal model is fed from an index of samples.", "pipefit data MANIFEST")),
        (
            write_index(tmp_path / "other", patch=5),
            model,
            ("The patches of the images do not fit the model.", "48"),
        ),
        (
            write_index(tmp_path / "own"),
            blind,
            ("The samples have images to look at, and the model has no module for them.",),
        ),
    ):
        config = TrainConfig(plan="p", run_dir="r", steps=1, data=(str(data),), held_out=0)
        with pytest.raises(DataError) as error:
            open_images(plan, its_model, config, 0, torch.device("cpu"))
        assert all(word in str(error.value) for word in words), str(error.value)
