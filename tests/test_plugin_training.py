"""An optimizer and a schedule family of other packages, by their entry point alone: planned, trained and reported.

The packages hold the examples of the how-to pages. Two processes train to the losses of one process, in float64.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests.support import train_toys as toys
from tests.support import worker_plans as plans
from tests.support.plugin_commands import read_losses, run_with_package
from tests.support.plugin_package import page_blocks, write_package

from pipefit.codec import load_text
from pipefit.plan.types import Plan

STEPS = 3
SIZE = ("--batch", "8", "--seq", "16", "--precision", "float64")
CONFIG = plans.LLAMA | {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}

pytestmark = [pytest.mark.slow, pytest.mark.gloo]


class Commands:
    """The commands of pipefit with a package installed, in a folder with a model and a text."""

    def __init__(self, folder: Path, name: str, code: str) -> None:
        (folder / "my-model").mkdir()
        (folder / "my-model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        self.folder, self.text = folder, toys.write_text(folder)
        site = write_package(folder / "site", {f"{name}.py": code}, name)
        self.run = partial(run_with_package, site, folder)

    def make_plan(self, processes: int, constraints: str, *words: str) -> tuple[Plan, str]:
        """Return the plan of this many processes, and the command's output."""
        name = f"plan-{processes}.json"
        fixes = [word for text in (*constraints.split(), "recompute=none") for word in ("--fix", text)]
        printed = self.run("plan", "--model", "my-model", "--local", str(processes), *SIZE, *fixes, *words, "-o", name)
        return load_text(Plan, (self.folder / name).read_text(encoding="utf-8"), name), printed

    def train_losses(self, processes: int, *words: str) -> list[float]:
        """Train with the plan of this many processes, and return the losses."""
        name = f"run-{processes}"
        self.run("train", f"plan-{processes}.json", "--data", str(self.text), "--steps", str(STEPS),
                 "--held-out", "8", "--device", "cpu", "--local", str(processes), *words, "-o", name)  # fmt: skip
        losses = read_losses(self.folder / name)
        assert len(losses) == STEPS
        return losses

    def report_page(self) -> str:
        """Return the report of the run of two processes."""
        self.run("report", "run-2", "-o", "report.html")
        return (self.folder / "report.html").read_text(encoding="utf-8")


def test_an_optimizer(tmp_path: Path) -> None:
    commands = Commands(tmp_path, "toy_sign", page_blocks("add-an-optimizer.md")[0])
    plan, printed = commands.make_plan(2, "replicas=2 sharded_state=optimizer microbatches=2", "--optimizer", "sign")
    commands.make_plan(1, "microbatches=1", "--optimizer", "sign")
    assert plan.job.optimizer == "sign" and plan.decisions["sharded_state"] == "optimizer"
    assert ", sign, on 2 devices" in printed
    options = ("--lr", "0.003", "--optimizer-option", "momentum=0.8")
    losses, single = commands.train_losses(2, *options), commands.train_losses(1, *options)
    assert losses == pytest.approx(single, rel=1e-12) and losses[-1] < losses[0] - 0.01
    assert "Optimizer <b>sign</b>" in commands.report_page()


def test_a_schedule_family(tmp_path: Path) -> None:
    code = page_blocks("add-a-schedule-family.md")[0]
    assert "check_schedule_family(family)\n" in code
    commands = Commands(tmp_path, "toy_order", code.replace("check_schedule_family(family)\n", ""))
    plan, printed = commands.make_plan(2, "schedule=breadth-first stages=6 microbatches=4")
    commands.make_plan(1, "microbatches=1")
    assert plan.order.name == "breadth-first" and len(plan.stages) == 6 and "breadth-first" in printed
    losses, single = commands.train_losses(2), commands.train_losses(1)
    assert losses == pytest.approx(single, rel=1e-12) and losses[-1] < losses[0]
    assert "breadth-first" in commands.report_page()
