"""Commands of pipefit in processes that have a package installed, and the losses of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support import train_toys as toys
from tests.support.plugin_package import package_environment


def run_with_package(site: Path, folder: Path, *words: str) -> str:
    """Run a command of pipefit in a folder, with the package of `site` installed. Returns its output, after a check of
    its exit code."""
    extra = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-m", "pipefit", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=package_environment(site) | extra,
        timeout=toys.TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_losses(run: Path) -> list[float]:
    """Return the losses of all steps of a run."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]
