"""What a run says of images that broke after they were indexed, and of the data that it waited for."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import modules_toys as toys
import pytest
import torch
from modules_toys import Layout
from test_train_images import JOB, small_model, write_index

from pipefit.data.multimodal.index import open_index
from pipefit.errors import DataError, RunError
from pipefit.run.config import TrainConfig, check_train_config
from pipefit.run.image_feeding import ImageFeeding, open_images
from pipefit.run.metrics import Log
from pipefit.run.train import Run
from pipefit.show.record import read_run


def feeding(index: Path, **options: Any) -> ImageFeeding:
    model = small_model()
    plan = toys.plan(model, dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)
    config = TrainConfig(plan="p", run_dir="r", steps=4, data=(str(index),), held_out=0, **options)
    return open_images(plan, model, check_train_config(config), 0, torch.device("cpu"))


def test_a_broken_image_ends_the_step_or_is_told_once(tmp_path: Path) -> None:
    """Workers and the process itself feed the same, and what was replaced stands in the metrics."""
    index = write_index(tmp_path)
    for image in range(open_index(index).summary.images):
        path = open_index(index).image_path(image)
        path.write_bytes(path.read_bytes()[:40] if image == 2 else path.read_bytes())
    with pytest.raises(DataError, match="broken now"):
        for step in range(3):
            feeding(index).step(step)
    fed = [feeding(index, on_broken="blank", workers=workers) for workers in (0, 1)]
    out = io.StringIO()
    log = Log(tmp_path, out=out)
    run: Any = SimpleNamespace(feeding=fed[1], world=SimpleNamespace(size=1), _broken=set())
    for step in range(3):
        one, two = (each.step(step) for each in fed)
        for stage, microbatches in one.feeds.items():
            for mine, others in zip(microbatches, two.feeds[stage], strict=True):
                assert mine[0].data.keys() == others[0].data.keys()
                assert all(torch.equal(value, others[0].data[name]) for name, value in mine[0].data.items())
        Run.tell_broken(run, step + 1, log)
    fed[1].close()
    log.close()
    path = str(open_index(index).image_path(2))
    assert fed[0].broken == fed[1].broken and list(fed[1].broken) == [path]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [list(record["broken_images"]) for record in records] == [[path]], "told once, over three steps"
    assert f"broken images: 1, among them {path}: " in out.getvalue()


def test_a_report_passes_over_what_was_said_of_images(tmp_path: Path) -> None:
    step = {"step": 1, "loss": 2.0, "step_s": 0.5}
    lines = [step, {"step": 1, "broken_images": {"a.jpg": "cut"}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = small_model()
    plan = toys.plan(model, dict.fromkeys(toys.ALL, Layout()), together=True, order="gpipe", job=JOB)
    from pipefit.plan.check import save_plan

    save_plan(plan, tmp_path / "plan.json")
    assert [each.step for each in read_run(tmp_path).steps] == [1]


def test_workers_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        check_train_config(TrainConfig(plan="p", run_dir="r", steps=1, prepare="threads"))  # type: ignore[arg-type]
    assert (error.value.where, error.value.seen) == ("--prepare", "threads")
    assert error.value.allowed == "processes or ray"
