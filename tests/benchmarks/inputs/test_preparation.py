"""The benchmark of preparation runs as its docstring says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_waiting_is_less_elsewhere(tmp_path: Path) -> None:
    """With about twice the time that images take, waiting is a small part of what it is in the trainer's process."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.inputs.preparation", "--quick", "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    row = found["rows"][-1]
    assert row["step_over_work"] > 0.5 and found["images"]["of_a_step"] == 8
    assert row["elsewhere"]["median_ms"] < 0.25 * row["in_process"]["median_ms"]


def test_the_page_has_what_was_recorded() -> None:
    """Every row; under 10 ms where the cores keep up with what the planner's margin leaves them."""
    found = json.loads((ROOT / "benchmarks" / "results" / "preparation.json").read_text())
    page = (ROOT / "docs" / "reference" / "data.md").read_text().splitlines()
    assert "+changes" not in found["provenance"]["commit"]
    assert {row["cores"] for row in found["rows"]} == {1, 2}
    for row in found["rows"]:
        sides = [row[side] for side in ("in_process", "ahead", "elsewhere")]
        cells = [f"{row['cores']}", f"{row['step_over_work']:.2f}", *(f"{side['median_ms']:.1f}" for side in sides)]
        assert "| " + " | ".join([*cells, f"{sides[-1]['most_ms']:.1f}"]) + " |" in page, cells
        if row["step_over_work"] >= 1.2:
            assert sides[-1]["median_ms"] < 10
