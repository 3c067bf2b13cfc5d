"""`pipefit plan`, `train` and `verify` of a directory whose config.json has no family of pipefit: the class of
`transformers`, trained on text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.support import train_toys as toys
from typer.testing import CliRunner

from benchmarks.models.tiny_configs import tiny_config
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


def train_words(plan: Path, run: Path, rate: str = "3e-3") -> list[str]:
    return ["train", str(plan), "-o", str(run), "--steps", "2", "--lr", rate, "--device", "cpu"]


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


@pytest.mark.gloo
def test_files_of_the_class_start_a_run_and_are_written_again(tmp_path, alone):
    import torch
    from transformers import AutoModelForCausalLM

    from pipefit.model.any_class import build_class

    folder = tmp_path / "theirs"
    network = build_class({**tiny_config("hy_v3", dropout=False), "vocab_size": 300})
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.1)
    network.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    assert set(stored) != set(network.state_dict())
    save_file({**stored, "model.layers.9.norm.weight": torch.ones(2)}, folder / "model.safetensors")
    plan = make_plan(folder, 2, "--fix", "stages=2", "--fix", "microbatches=4")
    words = train_words(plan, tmp_path / "run", rate="1e-30")  # changes no parameter
    done = toys.start([sys.executable, "-m", "pipefit", *words, "--weights", str(folder)])
    assert done.returncode == 0, done.stderr
    log = done.stdout + done.stderr
    assert "tensors of the weight files that the model does not have: 1 (model.layers.9.norm.weight)" in log
    written = load_file(tmp_path / "run" / "weights" / "model.safetensors")
    assert set(written) == set(stored)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "weights", dtype=torch.float64)
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.double()), name
