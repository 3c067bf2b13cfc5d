"""The whole way in a lab: profile it, plan for what was measured, train the plan; the numbers are the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.lab_toys import kernel_state, lab_path, needs_lab, toy_cluster, toy_lab

from pipefit.cluster import load_cluster
from pipefit.lab.tables import DeviceTable
from pipefit.plan.check.rules import load_plan

RATES = {(0, 1): 2e7, (1, 0): 1e7}
TABLE = DeviceTable(flops_per_s=4e9, memory_bytes_per_s=4e9, knee_tokens=16.0, action_s=5e-3)


def pipefit(folder: Path, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pipefit", *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode in codes, (words, done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout + done.stderr


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_profile_plan_and_train_in_a_lab(tmp_path: Path) -> None:
    """On a machine busy with other work a run may be invalid (code 2); then it must say so, everywhere."""
    lab = lab_path(tmp_path, toy_lab(toy_cluster(2, 2, lambda a, b: RATES[a, b]), devices={"slow": TABLE}))
    before = kernel_state(lab)
    measure = (
        "--model",
        "tiny",
        "--sequence",
        "16",
        "--tokens",
        "32",
        "--quick",
        "--rounds",
        "1",
        "--link-rounds",
        "1",
    )
    said = pipefit(
        tmp_path, "lab", "run", str(lab), "--", "pipefit", "profile", *measure, "-o", "cluster.json", codes=(0, 2)
    )
    cluster = load_cluster(tmp_path / "cluster.json")
    assert [(host.name, host.kind, host.devices) for host in cluster.hosts] == [("n0", "slow", 2), ("n1", "slow", 2)]
    assert cluster.kinds["slow"].memory_bytes == 1 << 30
    assert cluster.kinds["slow"].peak_flops_per_s["float32"] == pytest.approx(4e9, rel=0.05)
    found = cluster.rails[0].bandwidth_bytes_per_s
    assert found[0][1] == pytest.approx(RATES[0, 1], rel=0.2) and found[1][0] == pytest.approx(RATES[1, 0], rel=0.2)
    assert ("INVALID" in said) != (" valid:" in said)

    choices = ("--batch", "8", "--seq", "16", "--precision", "float32", "--fix", "stages=2", "--fix", "microbatches=4")
    pipefit(tmp_path, "plan", "--model", "tiny", "--cluster", "cluster.json", *choices, "-o", "plan.json")
    train = ("train", "plan.json", "--data", "stdlib", "--steps", "3")
    words = ("lab", "run", str(lab), "--plan", "plan.json", "--", "pipefit", *train, "-o", "paced")
    said = pipefit(tmp_path, *words, codes=(0, 2))
    verdict = json.loads((tmp_path / "paced" / "lab.json").read_text())
    assert verdict["pace"] in said and ("lab: valid" in said) == verdict["valid"]
    assert int(verdict["pace"].split()[0]) > 0
    devices = load_plan(tmp_path / "plan.json").used_devices
    pipefit(tmp_path, *train, "-o", "free", "--local", str(len(devices)))
    assert losses(tmp_path / "paced") == pytest.approx(losses(tmp_path / "free"), rel=1e-5)
    assert kernel_state(lab) == before
