"""`pipefit plan`, `pipefit verify` and `pipefit train` of the user's own module in examples/models/own_module.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.support import train_toys as toys
from tests.support.whole_models import MODELS, load
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


@pytest.fixture(scope="module")
def without_data(tmp_path_factory) -> Path:
    """A plan for the example without its data set, beside a file with one that does not fit."""
    folder = tmp_path_factory.mktemp("without")
    text = (MODELS / "own_module.py").read_text().replace(", dataset=Stripes())", ")")
    (folder / "bare.py").write_text(text)
    (folder / "rows.py").write_text("def flat():\n    return [([0.0] * 256, 1)] * 64\n")
    return plan(folder / "plan.json", "--local", "1", source=f"{folder / 'bare.py'}:stripes")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("", ["names no data set to train on", "bare.py:stripes", "dataset=", "--data FILE.py:FUNCTION"]),
        ("text.txt", ["fed from a data set, not from text", "text.txt", "FILE.py:FUNCTION"]),
        ("rows.py:flat", ["does not fit the model's input", "rows.py:flat[0], input", "(256,)", "float (1, 16, 16)"]),
        ("rows.py:absent", ["The file has no such function", "absent", "flat"]),
    ],
)
def test_data_that_does_not_fit_is_one_error(tmp_path, alone, without_data, data, words):
    options = ("--data", str(without_data.parent / data)) if data else ()
    result = CliRunner().invoke(build_app(), train(without_data, tmp_path / "run", *options, steps=1))
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_model_for_any_length_needs_one():
    result = CliRunner().invoke(build_app(), ["plan", "--model", "tiny", "--local", "1", "--batch", "4"])
    text = result.exception.full_text()
    assert "sequence length is not set" in text
    assert "add --seq 1024" in text


def test_shards_of_a_whole_model_are_searched(tmp_path):
    alone = json.loads(plan(tmp_path / "alone.json", "--local", "2", "--fix", "shards=1").read_text())
    assert {stage["sharding"] for stage in alone["stages"]} == {"none"}
    options = ("--local", "2", "--fix", "shards=2", "--fix", "replicas=1")
    made = json.loads(plan(tmp_path / "plan.json", *options).read_text())
    assert {stage["sharding"] for stage in made["stages"]} == {"searched"}
    small = "\n\ndef small():\n    return example(BertMoe(20, 8, 8, 2, 1, experts=2), 8)\n"
    (tmp_path / "moe.py").write_text((MODELS / "bert_moe.py").read_text() + small)
    words = ["plan", "--model", f"{tmp_path / 'moe.py'}:small", "--batch", "8", "--local", "2", "--fix", "shards=2"]
    refused = CliRunner().invoke(build_app(), [*words, "--fix", "sharding=megatron-sp"])
    assert "needs a variable number of tokens" in refused.exception.full_text()
    assert "--fix sharding=searched" in refused.exception.full_text()
