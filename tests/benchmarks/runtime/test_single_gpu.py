"""`benchmarks/runtime/single_gpu.py`: its code runs without a GPU under --quick, else it says that it needs one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
BENCHMARK = [sys.executable, "-m", "benchmarks.runtime.single_gpu"]


@pytest.mark.slow
def test_quick_trains_the_same_model_three_ways(tmp_path):
    out = tmp_path / "result.json"
    command = [*BENCHMARK, "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "peak used for MFU" in done.stdout
    result = json.loads(out.read_text())
    assert result["device"] == "cpu, code test only" and result["provenance"]["command"]
    ways = result["models"]["tiny"]["ways"]
    assert set(ways) == {"pipefit", "pytorch eager", "pytorch compiled"}
    for name, row in ways.items():
        assert row["losses"] == pytest.approx(ways["pytorch eager"]["losses"], rel=1e-4), name
        assert row["losses"][-1] < row["losses"][0]
    assert result["models"]["tiny"]["predicted_bytes"] == planned_bytes(result["shape"])


def planned_bytes(shape):
    """What a user reads of the same training in the plan that `pipefit plan` makes."""
    words = ["--model", "tiny", "--local", "1", "--precision", shape["precision"], "--seq", str(shape["tokens"])]
    words += ["--batch", str(shape["rows"] * shape["microbatches"]), "--json"]
    constraints = {"stages": 1, "replicas": 1, "microbatches": shape["microbatches"], "recompute": shape["recompute"]}
    words += [word for key, value in constraints.items() for word in ("--fix", f"{key}={value}")]
    command = [sys.executable, "-m", "pipefit", "plan", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["prediction"]["lanes"][0]["peak_bytes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_what_is_missing():
    done = subprocess.run(BENCHMARK, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr and "--quick" in done.stderr
