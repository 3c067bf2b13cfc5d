"""`benchmarks/profiling/compute_curves.py --quick` measures, fits and tells slices with a context apart;
docs/design/profiling.md quotes the committed result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipefit.profile.points import MOST_POINTS

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_quick_compares_curves_with_unseen_points(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    command = [sys.executable, "-m", "benchmarks.profiling.compute_curves", "--quick", "--json", str(path)]
    command += ["--sequence", "64", "--tokens", "128", "--layers", "layers.0 of", "--unseen", "6"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text(encoding="utf-8"))
    [layer] = found["layers"]
    assert layer["measured_points"] <= MOST_POINTS and len(layer["unseen"]) == 6
    sliced = [point for point in layer["unseen"] if point["past"]]
    assert len(sliced) == 3 and all(point["tokens"] % 8 == 0 == point["past"] % 8 for point in sliced)
    assert set(layer["with_context"]) == {"F", "B", "I", "W", "F+B"}
    assert found["with_context"]["F"]["mean"] < 0.5, "a curve that is far off, even on a busy machine"
    assert "slices" in done.stdout and "apart on average" in done.stdout
