"""An index made for a model takes from it how images are cut; one that disagrees is refused by plan and train."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.multimodal_toys import mixed_manifest, write_images, write_rows
from typer.testing import CliRunner

from pipefit.cli import build_app
from pipefit.data.multimodal.fits import check_index, pixel_side
from pipefit.data.multimodal.images import ImageRule
from pipefit.data.multimodal.index import IndexRequest, make_index, open_index
from pipefit.data.multimodal.sample_rows import rows_of_index
from pipefit.errors import DataError, PipefitError
from pipefit.model.graph import Model
from pipefit.model.registry import open_model, resolve_model

VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 30,
       "patch_size": 6, "num_channels": 3}  # fmt: skip
LANGUAGE = {"model_type": "llama", "vocab_size": 260, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip
GENERATOR = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "latent_size": 12, "grid_size": 4}


def write_model(folder: Path, **changes: Any) -> str:
    """A directory with a ViT of 25 patches of 6 pixels, and a generator of 16 latents of 2 pixels."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "multimodal", "vision": VIT, "language": LANGUAGE, "generator": GENERATOR, **changes}
    (folder / "config.json").write_text(json.dumps({name: part for name, part in config.items() if part}))
    return str(folder)


def run(*words: str) -> Any:
    return CliRunner().invoke(build_app(), list(words))


def test_the_model_says_how_images_are_cut_and_plan_takes_the_index(tmp_path: Path) -> None:
    model, manifest = write_model(tmp_path / "model"), str(mixed_manifest(tmp_path, 8))
    done = run("data", manifest, "-o", str(tmp_path / "index"), "--model", model, "--max-patches", "9")
    assert done.exit_code == 0, done.output
    request = open_index(tmp_path / "index").summary.request
    assert request.images == ImageRule(patch=6, max_patches=9, start_token=True)
    assert request.generated == ImageRule(patch=2, max_patches=16)
    assert run("data", manifest, "-o", str(tmp_path / "all"), "--model", model).exit_code == 0
    assert open_index(tmp_path / "all").summary.request.images.max_patches == 25
    index = open_index(tmp_path / "index")
    check_index(open_model(model), index, rows_of_index(index, 128))


@pytest.mark.parametrize("name", ["multimodal-tiny", "mllm-9b"])
def test_an_index_for_a_built_in_model_is_one_that_it_takes(tmp_path: Path, name: str) -> None:
    write_images(tmp_path, 1)
    rows = [{"id": "1", "parts": [{"image": "000.png"}, {"generate": "000.png"}, {"text": "a"}]}]
    done = run("data", str(write_rows(tmp_path / "m.jsonl", rows)), "-o", str(tmp_path / "i"), "--model", name)
    assert done.exit_code == 0, done.output
    index, described = open_index(tmp_path / "i"), resolve_model(name)
    config, request = described.config, index.summary.request
    assert request.images.patch == config["vision"]["patch_size"]
    assert 3 * request.generated.patch**2 == config["generator"]["latent_size"]
    assert request.images.max_patches == (config["vision"]["image_size"] // config["vision"]["patch_size"]) ** 2


@pytest.mark.parametrize(
    ("words", "where", "seen", "allowed"),
    [
        (("--patch", "8"), "--patch", 8, "6"),
        (("--no-start-token",), "--start-token", False, "True"),
        (("--latent-patch", "4"), "--latent-patch", 4, "2"),
    ],
)
def test_options_that_contradict_the_model(
    tmp_path: Path, words: tuple[str, ...], where: str, seen: Any, allowed: str
) -> None:
    done = run("data", str(tmp_path), "-o", str(tmp_path / "x"), "--model", write_model(tmp_path / "model"), *words)
    error = done.exception
    assert isinstance(error, DataError) and error.what == "The option contradicts the image format of the model."
    assert (error.where, error.seen, error.allowed) == (where, seen, allowed)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"vision": VIT | {"num_channels": 1}}, "The images of an index have three channels"),
        ({"language": LANGUAGE | {"vocab_size": 200}}, "The tokenizer of the index has more tokens"),
        (None, "This model does not define an image format."),
    ],
)
def test_models_that_no_index_can_be_made_for(tmp_path: Path, changes: dict[str, Any] | None, what: str) -> None:
    model = "tiny" if changes is None else write_model(tmp_path / "model", **changes)
    error = run("data", str(tmp_path), "-o", str(tmp_path / "x"), "--model", model).exception
    assert isinstance(error, PipefitError) and what in error.what


def test_latents_that_are_no_pixels_are_left_to_the_options() -> None:
    assert [pixel_side(values) for values in (12, 192, 768, 16, 4, 3)] == [2, 8, 16, 0, 0, 1]


# An index that disagrees, where a plan is made and where a run starts: `check_index` is what both ask.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(write_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("images", "options", "what", "seen"),
    [
        ({"patch": 4}, {}, "The patches of the images do not fit the model.", "48 numbers a patch"),
        (
            {"start_token": False},
            {},
            "The index and the model disagree on the tokens of images",
            "without a start token",
        ),
        (
            {"window": 2},
            {},
            "The index and the model disagree on the tokens of images",
            "with a start token, in windows of 2 x 2 patches",
        ),
        ({}, {"image_token": 260}, "The placeholder id of images is outside the model's vocabulary.", "260"),
        ({}, {"generation_token": 999}, "The placeholder id of images is outside the model's vocabulary.", "999"),
    ],
)
def test_an_index_that_the_model_does_not_take(
    tmp_path: Path, model: Model, images: dict[str, Any], options: dict[str, Any], what: str, seen: str
) -> None:
    rule = replace(ImageRule(patch=6, max_patches=9, start_token=True), **images)
    latents = ImageRule(patch=2, max_patches=6)
    source = str(mixed_manifest(tmp_path, 8))
    make_index(IndexRequest(source=source, images=rule, generated=latents, **options), tmp_path / "index")
    index = open_index(tmp_path / "index")
    with pytest.raises(DataError) as error:
        check_index(model, index, rows_of_index(index, 192))
    assert error.value.what.startswith(what) and str(error.value.seen).startswith(seen)
    assert "pipefit data SOURCE -o INDEX" in str(error.value.next_step)


def test_plan_refuses_an_index_that_the_model_does_not_take(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    assert run("data", str(mixed_manifest(tmp_path, 8)), "-o", str(tmp_path / "index"), "--patch", "6",
               "--latent-patch", "2", "--max-patches", "9", "--max-latents", "6").exit_code == 0  # fmt: skip
    words = ["--local", "2", "--batch", "4", "--seq", "128", "--data", str(tmp_path / "index")]
    error = run("plan", "--model", model, *words).exception
    assert isinstance(error, DataError) and error.seen == "without a start token"
