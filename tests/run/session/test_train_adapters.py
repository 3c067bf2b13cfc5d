"""`pipefit plan --lora`, `train`, PEFT's files and a merged model, as a user has them in a row of commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import train_toys as toys
from tests.support import worker_plans as plans
from tests.support.library_parity import library_model
from typer.testing import CliRunner

from pipefit.cli import build_app
from pipefit.errors import PipefitError

CONFIG = plans.LLAMA | {"vocab_size": 256, "num_hidden_layers": 2}


def run_command(*words: str) -> str:
    result = CliRunner().invoke(build_app(), [*words])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> str:
    """The message of a command that must be refused."""
    result = CliRunner().invoke(build_app(), [*words])
    assert isinstance(result.exception, PipefitError), result
    return result.exception.full_text()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama."""
    folder = tmp_path_factory.mktemp("models") / "base"
    torch.manual_seed(2)
    library_model(CONFIG).save_pretrained(folder)
    return folder


def plan_words(base: Path, path: Path, devices: int, *options: str) -> tuple[str, ...]:
    return (
        "plan", "--model", str(base), "--local", str(devices), "--batch", "8", "--seq", "16", "--precision", "float64",
        "--quiet", "-o", str(path), *options,
    )  # fmt: skip


def train_words(plan: Path, run: Path, text: Path, *options: str, steps: int = 4) -> list[str]:
    return toys.command(plan, text, run, "--lr", "1e-2", *options, steps=steps)[3:]


def read_losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.gloo
def test_plan_train_export_and_merge(base: Path, tmp_path: Path, alone: Any) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    text, one, two = toys.write_text(tmp_path), tmp_path / "one.json", tmp_path / "two.json"
    lora = ("--lora", "4", "--lora-alpha", "8", "--lora-dropout", "0.1")
    run_command(*plan_words(base, one, 1, *lora))
    run_command(*plan_words(base, two, 2, *lora, "--fix", "stages=2", "--fix", "microbatches=4"))
    assert json.loads(one.read_text())["model"]["config"]["adapters"]["rank"] == 4
    out = run_command(*train_words(one, tmp_path / "a", text, "--weights", "model", "--merge", "--save-every", "2"))
    assert "trained parameters: 3,712 of 35,616 (10.42%)" in out
    assert f"weights in {tmp_path / 'a' / 'weights'}" in out

    config = json.loads((tmp_path / "a" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.1)
    assert config["base_model_name_or_path"] == str(base) and config["task_type"] == "CAUSAL_LM"
    tokens = torch.randint(0, 256, (2, 9))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    before = plain(tokens).logits
    adapted = PeftModel.from_pretrained(plain, tmp_path / "a" / "adapter", autocast_adapter_dtype=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "weights", dtype=torch.float64)
    torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=1e-6, atol=1e-6)
    assert (merged(tokens).logits - before).abs().max() > 1e-4

    done = toys.start([sys.executable, "-m", "pipefit", *train_words(two, tmp_path / "b", text, "--weights", "model")])
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(read_losses(tmp_path / "b"), read_losses(tmp_path / "a"), rtol=1e-9)
    assert f"adapter in {tmp_path / 'b' / 'adapter'}" in done.stdout and not (tmp_path / "b" / "weights").exists()

    checkpoint = tmp_path / "a" / "checkpoints" / "step-00000002"
    run_command(*train_words(one, tmp_path / "c", text, "--resume", str(checkpoint)))
    assert read_losses(tmp_path / "c") == read_losses(tmp_path / "a")[2:]


@pytest.mark.gloo
def test_a_run_goes_on_from_adapters_of_peft(base: Path, tmp_path: Path, alone: Any) -> None:
    """Two processes start from the adapters that one has trained; their first loss is that of the merged model, which
    equals PEFT's (`test_export.py`)."""
    text, one, two = toys.write_text(tmp_path), tmp_path / "one.json", tmp_path / "two.json"
    lora = ("--lora", "4", "--rslora", "--lora-targets", "q_proj,v_proj,down_proj")
    run_command(*plan_words(base, one, 1, *lora))
    run_command(*plan_words(base, two, 2, *lora, "--fix", "stages=2", "--fix", "microbatches=4"))
    run_command(*train_words(one, tmp_path / "a", text, "--weights", "model", "--merge", steps=3))
    adapter = tmp_path / "a" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["use_rslora"] is True

    begin = ("--weights", "model", "--adapter", str(adapter))
    done = toys.start([sys.executable, "-m", "pipefit", *train_words(two, tmp_path / "b", text, *begin, steps=2)])
    assert done.returncode == 0, done.stderr
    run_command(*train_words(one, tmp_path / "c", text, *begin, steps=2))
    run_command(*train_words(one, tmp_path / "d", text, "--weights", "model", steps=2))
    np.testing.assert_allclose(read_losses(tmp_path / "b"), read_losses(tmp_path / "c"), rtol=1e-9)
    assert read_losses(tmp_path / "c")[0] != read_losses(tmp_path / "d")[0]

    run_command(*plan_words(base, tmp_path / "plain.json", 1))
    merged = ("--weights", str(tmp_path / "a" / "weights"))
    run_command(*train_words(tmp_path / "plain.json", tmp_path / "e", text, *merged, steps=1))
    assert read_losses(tmp_path / "e")[0] == pytest.approx(read_losses(tmp_path / "c")[0], rel=1e-6)


def test_adapters_that_do_not_belong_to_the_plan_are_refused(base: Path, tmp_path: Path, alone: Any) -> None:
    from safetensors.torch import load_file, save_file

    text, path, folder = toys.write_text(tmp_path), tmp_path / "plan.json", tmp_path / "a" / "adapter"
    run_command(*plan_words(base, path, 1, "--lora", "2", "--lora-targets", "q_proj"))
    assert "There are no adapters here." in started(path, text, tmp_path / "x", folder)
    run_command(*train_words(path, tmp_path / "a", text, "--weights", "model", steps=1))
    fields = json.loads((folder / "adapter_config.json").read_text())

    def refusal(**changed: Any) -> str:
        (folder / "adapter_config.json").write_text(json.dumps(fields | changed))
        return started(path, text, tmp_path / "x", folder)

    assert "plan with --lora 8 --lora-alpha 4 --rslora" in refusal(r=8, use_rslora=True)
    assert "LORA, DoRA" in refusal(use_dora=True) and "complete modules" in refusal(modules_to_save=["lm_head"])
    assert "which changes the base model" in refusal(init_lora_weights="pissa_niter_4")
    assert "bias 'all'" in refusal(bias="all") and "merge_and_unload()" in refusal(peft_type="IA3")
    (folder / "adapter_config.json").write_text("[")
    assert "cannot be read" in started(path, text, tmp_path / "x", folder)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    other = tmp_path / "other.json"
    run_command(*plan_words(base, other, 1, "--lora", "2", "--lora-targets", "q_proj,v_proj"))
    message = started(other, text, tmp_path / "x", folder)
    assert "missing: base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight" in message
    assert "plan with --lora-targets q_proj" in message
    tensors = load_file(folder / "adapter_model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    save_file(first, folder / "adapter_model.safetensors")
    message = started(path, text, tmp_path / "x", folder)
    assert "plan with --lora-targets model.layers.0.self_attn.q_proj" in message, "the other layer has none"
    message = toys.train_here(path, text, tmp_path / "x", "--adapter", str(folder))
    assert message[0] == 2 and "add --weights model" in message[1]


def started(plan: Path, text: Path, run: Path, adapter: Path) -> str:
    """The message of a run that must not start from these adapters."""
    code, message = toys.train_here(plan, text, run, "--weights", "model", "--adapter", str(adapter))
    assert code == 2 and not run.exists(), message
    return message


def test_frozen_parts_stay_and_the_whole_model_is_exported(base: Path, tmp_path: Path, alone: Any) -> None:
    from safetensors.torch import load_file

    text, path = toys.write_text(tmp_path), tmp_path / "plan.json"
    run_command(*plan_words(base, path, 1, "--freeze", "model.embed_tokens.*", "--freeze", "model.layers.0.*"))
    out = run_command(*train_words(path, tmp_path / "run", text, "--weights", "model"))
    assert "trained parameters: " in out
    first, last = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "run" / "weights"))
    changed = {name for name in first if not torch.equal(first[name], last[name].to(first[name].dtype))}
    assert changed and all(name.startswith(("model.layers.1.", "model.norm", "lm_head")) for name in changed)


def test_other_commands_know_the_adapters(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run_command(*plan_words(base, path, 1, "--lora", "4", "--lora-targets", "q_proj,v_proj"))
    page = str(tmp_path / "report.html")
    for words in (("explain", str(path)), ("simulate", str(path)), ("report", str(path), "-o", page)):
        run_command(*words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--lora", "-1"), "--lora"),
        (("--lora", "4", "--lora-alpha", "0"), "--lora-alpha"),
        (("--lora", "4", "--lora-dropout", "1"), "a probability from 0 up to 1"),
        (("--lora", "4", "--lora-targets", ""), "names of modules such as q_proj,v_proj"),
        (("--lora", "4", "--lora-targets", "all-linear,q_proj"), "stands alone"),
        (("--lora", "4", "--lora-targets", "q_prj"), "did you mean q_proj?"),
        (("--lora", "4", "--lora-targets", "embed_tokens"), "q_proj, k_proj, v_proj, o_proj"),
        (("--lora-dropout", "0.1"), "add --lora 16"),
        (("--rslora",), "add --lora 16"),
        (("--freeze", "model.layer.*"), "No parameter of the model matches this pattern."),
        (("--freeze", "*"), "there is nothing to train"),
    ],
)
def test_wrong_options_are_refused(base: Path, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    assert words in refused(*plan_words(base, tmp_path / "plan.json", 1, *options))


def test_wrong_runs_are_refused(base: Path, tmp_path: Path, alone: Any) -> None:
    text = toys.write_text(tmp_path)
    path, _ = toys.write_plan(tmp_path, microbatches=2)
    message = toys.train_here(path, text, tmp_path / "run", "--weights", "model")
    assert message[0] == 2 and "no directory with weights" in message[1]
    message = toys.train_here(path, text, tmp_path / "run", "--merge")
    assert message[0] == 2 and "no adapters to merge" in message[1]
    message = toys.train_here(path, text, tmp_path / "run", "--adapter", str(base))
    assert message[0] == 2 and "no adapters to start from files" in message[1]


def test_a_run_names_the_weights_that_it_does_not_start_from(base: Path, tmp_path: Path, alone: Any) -> None:
    text, path = toys.write_text(tmp_path), tmp_path / "plan.json"
    run_command(*plan_words(base, path, 1))
    out = run_command(*train_words(path, tmp_path / "run", text, steps=1))
    assert f"--weights model starts from those in {base}" in out and "trained parameters" not in out
