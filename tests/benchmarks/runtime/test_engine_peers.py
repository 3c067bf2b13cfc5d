"""`benchmarks/runtime/engine_peers.py`: both sides train the same model, and what is unequal is not timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.gloo
def test_quick_benchmark(tmp_path: Path) -> None:
    """One part anew beside an earlier part: equal results in two processes, three pairs, memory of every rank."""
    out = tmp_path / "result.json"
    out.write_text(json.dumps({"parts": {"adamw": ["earlier"]}}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.runtime.engine_peers", "--quick", "--only", "sequence", "--json", out],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["parts"]["adamw"] == ["earlier"]
    (row,) = result["parts"]["sequence"]
    assert row["equal"] and row["pairs"] == 3 and row["processes"] == 2
    assert row["losses"][-1] == pytest.approx([row["losses"][-1][1]] * 2, rel=1e-5)
    assert row["losses"][-1][0] < row["losses"][0][0]
    assert len(row["ours_bytes"]) == len(row["torch_bytes"]) == 2
    assert row["bytes_ratio"] == max(a / b for a, b in zip(row["ours_bytes"], row["torch_bytes"], strict=True))
    assert row["ratio_95"][0] < row["ratio"] < row["ratio_95"][1]
