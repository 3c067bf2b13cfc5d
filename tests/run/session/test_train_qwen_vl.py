"""`pipefit train` of a Qwen2.5-VL on images from files, against the class of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support import modules_toys as toys
from tests.support.modules_toys import Layout
from tests.support.multimodal_toys import write_images, write_rows
from tests.support.train_toys import train_here
from tests.support.vision_language import MODELS, TEXT, loss_of_theirs, save_model

from pipefit.data.multimodal.feeds import SampleSource, run_feed
from pipefit.data.multimodal.fits import requirements_of_model
from pipefit.data.multimodal.index import IndexRequest, make_index, open_index
from pipefit.data.multimodal.sample_rows import PATCHES, SAMPLES, rows_of_index
from pipefit.model.registry import open_model, typed_config
from pipefit.plan.check.rules import save_plan
from pipefit.plan.types import Job


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_step_on_files_has_the_loss_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with no, one and two images of several sizes, without document masks. Written files fit the class."""
    rope = {"type": "mrope", "mrope_section": [1, 2, 1]}
    monkeypatch.setitem(
        MODELS, "files", {**MODELS["qwen2_5_vl"], "text_config": {**TEXT, "vocab_size": 272, "rope_scaling": rope}}
    )
    theirs = save_model("files", tmp_path / "model")
    names = write_images(tmp_path / "images", 6)
    pictures: list[list[str]] = [[names[0]], [], names[1:3], [names[3]], names[4:6], []]
    rows = [
        {"parts": [{"text": f"row {n}", "learn": False}, *(p for name in row for p in _picture(name))]}
        for n, row in enumerate(pictures)
    ]
    rule = requirements_of_model(str(tmp_path / "model")).images
    assert rule is not None and rule.window == 2
    make_index(IndexRequest(source=str(write_rows(tmp_path / "m.jsonl", rows)), images=rule), tmp_path / "index")
    model, index = open_model(str(tmp_path / "model")), open_index(tmp_path / "index")
    job = Job(batch=len(rows), sequence=64, precision="float64", seed=3)
    alone = toys.plan(model, dict.fromkeys(("vision", "language"), Layout()), together=True, order="gpipe", job=job)
    save_plan(alone, tmp_path / "plan.json")
    weights = ("--weights", str(tmp_path / "model"), "--held-out", "0")
    code, error = train_here(tmp_path / "plan.json", tmp_path / "index", tmp_path / "run", *weights)
    assert code == 0, error
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    source = SampleSource(index=index, rows=rows_of_index(index, job.sequence), seed=job.seed)
    every = np.arange(source.rows.count)
    feeds = (run_feed(source, space, 0, every, 0).arrays for space in (PATCHES, SAMPLES))
    batch = {
        name: {key: torch.from_numpy(array) for key, array in arrays.items()}
        for name, arrays in zip(("vision", "language"), feeds, strict=True)
    }
    typed: Any = typed_config("multimodal", model.config)
    loss = loss_of_theirs(theirs, typed, batch).detach() / (batch["language"]["labels"] >= 0).sum()
    assert losses == pytest.approx([float(loss)], rel=1e-10)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "run/weights"))
    assert {key: value.shape for key, value in after.items()} == {key: value.shape for key, value in before.items()}


def _picture(name: str) -> list[dict[str, str]]:
    return [{"image": f"images/{name}"}, {"text": "this was it"}]
