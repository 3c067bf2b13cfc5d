"""The simulated proof of synthesized programs, in small: never slower than a baseline, never below the bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_quick_run_beats_every_side(tmp_path):
    file = tmp_path / "spmd.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/spmd.py", "--quick", "--json", str(file)],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["provenance"]["command"] == "python benchmarks/spmd.py --quick --json spmd.json"
    assert [row["model"] for row in result["models"]] == ["vgg19", "vit-b"]
    for row in result["models"]:
        assert not row["slower_than"], row
        assert all(row["bound_s"] <= seconds for seconds in row["sides_s"].values() if seconds is not None), row
        assert row["bound_s"] < row["ours_s"] and row["speedup"] >= 1.0
    assert result["models"][0]["speedup"] >= 2.41, "VGG's linear layers are not worth reducing"
