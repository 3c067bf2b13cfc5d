"""The benchmark runs, and its own checks (same bits, closed form) hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_quick_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planning.simulator_speed", "--quick", "--json", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["compute_actions"] == 16 * 128 * 2
    assert result["bit_equal_to_python"] and result["equal_to_closed_form"]
    assert result["seconds"]["sweep"]["median"] < result["seconds"]["sweep_python"]["median"]
    assert {"commit", "date", "machine", "packages", "command", "python"} <= set(result["provenance"])
    assert str(tmp_path) not in out.read_text() and str(ROOT) not in out.read_text()
    assert "the sweep over the arrays" in done.stdout


def test_the_committed_result_meets_the_bound() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "simulator.json").read_text())
    assert (result["stages"], result["microbatches"], result["compute_actions"]) == (64, 1024, 131072)
    assert result["seconds"]["times_and_sweep"]["median"] < 0.005
    assert result["bit_equal_to_python"] and result["equal_to_closed_form"]


def test_the_documented_figures_are_the_committed_ones() -> None:
    seconds = json.loads((ROOT / "benchmarks" / "results" / "simulator.json").read_text())["seconds"]
    page = (ROOT / "docs" / "design" / "simulator.md").read_text()
    for name in ("lower", "compile", "times", "sweep", "times_and_sweep", "sweep_python", "memory"):
        assert f"| {seconds[name]['median'] * 1e3:.2f} ms |" in page, name
