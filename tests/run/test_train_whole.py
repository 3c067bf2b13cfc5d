"""`pipefit plan`, `pipefit verify` and `pipefit train` of the user's own module in examples/models/own_module.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import train_toys as toys
from safetensors.torch import load_file
from tests.model.whole_models import MODELS, load
from typer.testing import CliRunner

from pipefit.cli import build_app

SOURCE = f"{MODELS / 'own_module.py'}:stripes"


def plan(path: Path, *options: str, batch: int = 16, source: str = SOURCE) -> Path:
    words = ["plan", "--model", source, "--batch", str(batch), "--precision", "float64", "-o", str(path)]
    result = CliRunner().invoke(build_app(), [*words, *options])
    assert result.exit_code == 0, result
    return path


def train(plan_file: Path, run: Path, *options: str, steps: int) -> list[str]:
    words = ["train", str(plan_file), "-o", str(run), "--steps", str(steps), "--lr", "3e-3", "--device", "cpu"]
    return [*words, "--decay", "constant", *options]


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.gloo
def test_a_users_own_module_is_planned_trained_and_loaded_again(tmp_path, alone):
    two = plan(tmp_path / "two.json", "--local", "2", "--fix", "stages=2", "--fix", "microbatches=4")
    done = toys.start([sys.executable, "-m", "pipefit", *train(two, tmp_path / "run", "--save-every", "8", steps=16)])
    assert done.returncode == 0, done.stderr
    first = losses(tmp_path / "run")
    assert len(first) == 16
    assert first[-1] < first[0] - 0.3
    assert "eval_loss" in (tmp_path / "run" / "metrics.jsonl").read_text()

    one = plan(tmp_path / "one.json", "--local", "1")
    middle = tmp_path / "run" / "checkpoints" / "step-00000008"
    again = CliRunner().invoke(build_app(), train(one, tmp_path / "again", "--resume", str(middle), steps=16))
    assert again.exit_code == 0, again
    np.testing.assert_allclose(losses(tmp_path / "again"), first[8:], rtol=1e-9)

    network = load("own_module").network()
    network.load_state_dict(load_file(tmp_path / "again" / "weights" / "model.safetensors"), strict=True)
    wanted = load_file(tmp_path / "run" / "weights" / "model.safetensors")
    for name, value in network.double().state_dict().items():
        np.testing.assert_allclose(value.numpy(), wanted[name].numpy(), rtol=1e-6, atol=1e-7, err_msg=name)

    verified = CliRunner().invoke(build_app(), ["verify", str(two), "--device", "cpu", "--json"])
    assert verified.exit_code == 0, verified
    assert json.loads(verified.stdout)["fits"]
