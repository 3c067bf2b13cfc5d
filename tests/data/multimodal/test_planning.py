"""What planning takes from the data room: sampled global batches, their arrangement, the cores of preparation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.multimodal_toys import SEQUENCE, made_rows, mixed_index, shape_of, write_images
from typer.testing import CliRunner

from pipefit.data.multimodal.index import GENERATE, IMAGE, open_index
from pipefit.data.multimodal.planning import arranged_samples, sample_batches
from pipefit.data.multimodal.sample_rows import rows_of_index
from pipefit.data.multimodal.step import multimodal_step
from pipefit.data.preparation.cores import ImageRate, cores_for, cores_needed, image_sizes, measured_rate
from pipefit.errors import DataError
from pipefit.plan.request.sampled_batches import StageShares
from pipefit.plan.types import SampleArrangement, SampleLoad

LOADS = (SampleLoad(space="patches", token_s=0.01), SampleLoad(space="samples", row_s=1.0))


def test_sampled_batches_are_those_of_the_run_and_stand_as_in_it() -> None:
    """For every step: the planner's batch, arranged, has at every position the tokens that the run has there."""
    rows = made_rows(np.random.default_rng(0).lognormal(4, 1, 90).astype(np.int64))
    shape = shape_of(24, 4, ((1, 1), (1, 2)))
    arranging = SampleArrangement(loads=LOADS, swaps=10)
    samples = sample_batches(rows, 24, 3, seed=shape.seed, where="m.jsonl")
    assert samples.tokens["patches"].shape == (3, 24) and "latents" not in samples.tokens
    for step in range(3):
        order = arranged_samples(samples, step, arranging, [StageShares(own) for own in shape.shares], 4)
        run = multimodal_step(replace(shape, arranging=arranging), rows, step)
        assert samples.tokens["patches"][step][order].tolist() == run.counts["patches"].tolist()
        assert samples.squares["patches"][step][order].tolist() == (run.counts["patches"] ** 2).tolist()
    with pytest.raises(DataError, match="too small for one batch"):
        sample_batches(rows, 91, 1)


def test_cores_are_images_by_seconds_with_a_margin(tmp_path: Path) -> None:
    """1,920 samples of 8 images at 150 images a second and core, a step of 15 s: 15360 / 150 / 15 * 1.3 = 8.87."""
    assert cores_for(1920 * 8, 1 / 150, 15.0) == 9
    assert cores_for(0, 1.0, 1.0) == 0 and cores_for(10, 0.1, 1.3) == 1 and cores_for(10.1, 0.1, 1.3) == 2
    index = mixed_index(tmp_path, 12)
    rows = rows_of_index(index, SEQUENCE)
    pixels, tokens = image_sizes(index)
    assert len(pixels) == rows.images.sum() and tokens.sum() == sum(
        rows.counts[s].sum() for s in ("patches", "latents")
    )
    rate = ImageRate(image_s=0.25, pixel_s=1e-3, patch_s=0.01)
    needed = cores_needed(index, rows, 24, 2.0, rate)
    each = [0.25 + 1e-3 * p + 0.01 * t for p, t in zip(pixels.tolist(), tokens.tolist(), strict=True)]
    assert needed.images == 24 * rows.images.mean() and needed.image_s == pytest.approx(np.mean(each))
    assert needed.cores == int(np.ceil(24 * rows.images.mean() * np.mean(each) / 2.0 * 1.3))
    assert needed.copies == 1 and "decoded by" not in needed.to_text()
    parts = np.asarray(index.parts)
    kinds = parts[(parts[:, 0] == IMAGE) | (parts[:, 0] == GENERATE)][:, 0].tolist()
    assert {*kinds} == {IMAGE, GENERATE}
    often = [2 if kind == IMAGE else 3.5 for kind in kinds]
    more = cores_needed(index, rows, 24, 2.0, rate, {"patches": 2, "latents": 3.5})
    work_s = np.mean([one * times for one, times in zip(each, often, strict=True)])
    assert more.cores == int(np.ceil(24 * rows.images.mean() * work_s / 2.0 * 1.3)) > needed.cores
    assert (more.images, more.image_s, more.copies) == (needed.images, needed.image_s, np.mean(often))
    assert f"images, each decoded by {more.copies:.3g} devices, in steps of 2 s" in more.to_text()


def test_a_measured_rate_says_what_the_measured_images_took_altogether(tmp_path: Path) -> None:
    index = mixed_index(tmp_path, 12)
    rate = measured_rate(index, images=200)
    pixels, tokens = image_sizes(index)
    assert rate.measured == len(pixels) and min(rate.image_s, rate.pixel_s, rate.patch_s) >= 0
    assert 0 < rate.decode_seconds(pixels, tokens).mean() < 0.1
    for image in range(index.summary.images):
        index.image_path(image).unlink(missing_ok=True)
    assert measured_rate(index).measured == 0


def answer(*words: str) -> dict[str, Any]:
    from pipefit.cli import build_app

    done = CliRunner().invoke(build_app(), ["data", *words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def test_the_command_makes_a_manifest_and_an_index_and_says_the_cores(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for name in write_images(folder, 4):
        (folder / name).with_suffix(".txt").write_text("text")
    assert answer(str(folder), "-o", str(tmp_path / "m.jsonl"), "--task", "generate") == {"samples": 4}
    words = [str(tmp_path / "m.jsonl"), "-o", str(tmp_path / "index"), "--latent-patch", "2", "--max-latents", "6"]
    found = answer(*words, "--cores", "0.001", "--batch", "64")
    assert found["samples"] == 4 and found["request"]["generated"]["patch"] == 2
    assert found["cores"]["images"] == 64 and found["cores"]["cores"] >= 1
    assert open_index(tmp_path / "index").summary.digest == found["digest"]
    (folder / "001.jpg").write_text("broken")
    assert answer(*words, "--on-broken", "skip")["left_out"] == 1
    from pipefit.cli import build_app

    told = CliRunner().invoke(build_app(), ["data", *words, "--on-broken", "skip"])
    assert "1 samples left out for a broken or absent image" in told.output
    assert "001 (" in told.output and "001.jpg: not an image that Pillow knows" in told.output


@pytest.mark.parametrize("option", ["--task", "--on-broken", "--check"])
def test_the_command_refuses_words_that_it_does_not_know(tmp_path: Path, option: str) -> None:
    from pipefit.cli import build_app

    done = CliRunner().invoke(build_app(), ["data", str(tmp_path), "-o", str(tmp_path / "x"), option, "perhaps"])
    assert isinstance(done.exception, DataError)
    assert done.exception.what == f"There is no such {option}." and done.exception.seen == "perhaps"
