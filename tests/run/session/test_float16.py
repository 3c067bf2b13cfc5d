"""Runs in float16, and runs whose gradients are not finite."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support import train_toys as toys

from pipefit.codec import dump_text
from pipefit.plan.types import Plan
from pipefit.run.checkpoint import checkpoint


def write_plan(folder: Path, precision: str, **decisions: Any) -> Path:
    """A plan of the tiny model in this precision."""
    path, plan = toys.write_plan(folder, f"{precision}.json", **decisions)
    changed: Plan = replace(plan, job=replace(plan.job, precision=precision))  # type: ignore[arg-type]
    path.write_text(dump_text(changed), encoding="utf-8")
    return path


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def test_losses_are_those_of_float32_and_a_resume_goes_on(tmp_path: Path, alone: None) -> None:
    text = toys.write_text(tmp_path)
    plans = {name: write_plan(tmp_path, name, microbatches=2) for name in ("float32", "float16")}
    for name, path in plans.items():
        assert toys.train_here(path, text, tmp_path / name, steps=6) == (0, "")
    wide, narrow = steps_of(tmp_path / "float32"), steps_of(tmp_path / "float16")
    assert [step["loss"] for step in narrow] == pytest.approx([step["loss"] for step in wide], rel=5e-3)
    assert [step["grad_norm"] for step in narrow] == pytest.approx([step["grad_norm"] for step in wide], rel=5e-2)
    assert [step["loss"] for step in narrow] != [step["loss"] for step in wide]
    assert narrow[-1]["loss_scale"] == 65536 and narrow[-1]["skipped_steps"] == 0
    assert wide[-1]["loss_scale"] == 0
    run = tmp_path / "parts"
    assert toys.train_here(plans["float16"], text, run, "--warmup", "1", steps=3)[0] == 0
    manifest = checkpoint.read_manifest(checkpoint.locate_checkpoint(run))
    assert manifest.extra["loss_scale"] == {"scale": 65536.0, "finite_steps": 3}
    assert toys.train_here(plans["float16"], text, run, "--warmup", "1", "--resume", str(run), steps=6)[0] == 0
    assert checkpoint.read_manifest(checkpoint.locate_checkpoint(run)).extra["loss_scale"]["finite_steps"] == 6


@pytest.mark.gloo
def test_stages_of_two_processes_train_in_float16(tmp_path: Path) -> None:
    text = toys.write_text(tmp_path)
    path = write_plan(tmp_path, "float16", stages=2, microbatches=4)
    done = toys.start(toys.command(path, text, tmp_path / "run", "--local", "2", "--lr", "1e-3", steps=5))
    assert done.returncode == 0, done.stderr
    assert "loss_scale: 65536" in done.stdout
    losses = [step["loss"] for step in steps_of(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.1


def test_infinite_gradients_stop_a_run_before_its_checkpoint(tmp_path: Path, alone: None) -> None:
    text = toys.write_text(tmp_path)
    path, _ = toys.write_plan(tmp_path, microbatches=2)
    options = ("--lr", "1e30", "--save-every", "1", "--log-every", "50")
    code, err = toys.train_here(path, text, tmp_path / "run", *options, steps=6)
    assert code == 2 and "The gradients are not finite" in err and "--nonfinite skip" in err, err
    saved = checkpoint.read_manifest(checkpoint.locate_checkpoint(tmp_path / "run")).extra["step"]
    assert f"resume from the last checkpoint (step {saved})" in err


def test_infinite_gradients_are_skipped_by_choice(tmp_path: Path, alone: None) -> None:
    text = toys.write_text(tmp_path)
    path, _ = toys.write_plan(tmp_path, microbatches=2)
    options = ("--lr", "1e30", "--nonfinite", "skip")
    code, err = toys.train_here(path, text, tmp_path / "run", *options, steps=6)
    assert code == 0, err
    last = steps_of(tmp_path / "run")[-1]
    assert last["skipped_steps"] >= 3 and not math.isfinite(last["grad_norm"])
    extra = checkpoint.read_manifest(checkpoint.locate_checkpoint(tmp_path / "run")).extra
    assert extra["skipped_steps"] == last["skipped_steps"]
