"""`pipefit plan`, `train` and `verify` of a directory whose config.json has no family of pipefit: the class of
`transformers`, trained on text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.support import train_toys as toys
from typer.testing import CliRunner

from benchmarks.tiny_configs import tiny_config
from pipefit.cli import build_app

TOKENS = 12


def run_command(*words: str) -> str:
    result = CliRunner().invoke(build_app(), [*words])
    assert result.exit_code == 0, result.output
    return result.stdout


def make_plan(folder: Path, devices: int, *options: str) -> Path:
    path = folder / f"{devices}.json"
    words = ("plan", "--model", str(folder), "--seq", str(TOKENS), "--batch", "8", "--precision", "float64")
    run_command(*words, "--local", str(devices), *options, "-o", str(path))
    return path


def train_words(plan: Path, run: Path) -> list[str]:
    return ["train", str(plan), "-o", str(run), "--steps", "2", "--lr", "3e-3", "--device", "cpu"]


def read_losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.slow
@pytest.mark.gloo
def test_a_directory_without_a_family_is_trained_on_text(tmp_path, alone):
    from pipefit.model.any_class import build_class

    config = {**tiny_config("stablelm"), "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    two = make_plan(tmp_path, 2, "--fix", "stages=2", "--fix", "microbatches=4")
    done = toys.start([sys.executable, "-m", "pipefit", *train_words(two, tmp_path / "two")])
    assert done.returncode == 0, done.stderr
    run_command(*train_words(make_plan(tmp_path, 1), tmp_path / "one"))
    losses = read_losses(tmp_path / "two")
    assert len(losses) == 2
    np.testing.assert_allclose(losses, read_losses(tmp_path / "one"), rtol=1e-9)

    network = build_class(config).double()
    weights = load_file(tmp_path / "two" / "weights" / "model.safetensors")
    network.load_state_dict(weights, strict=True)
    assert json.loads(run_command("verify", str(two), "--device", "cpu", "--json"))["fits"]
