"""`benchmarks/lab/calibration.py`: it runs under --quick, and what is committed and quoted is what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.lab_toys import needs_lab

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "benchmarks" / "results" / "lab_calibration.json"


@needs_lab
def test_quick_measures_a_lab(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.lab.calibration", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (lab,) = json.loads(out.read_text())["labs"]
    assert (lab["hosts"], lab["devices"], len(lab["pairs"])) == (4, 8, 4 * 4)
    assert len(lab["shared"]["cases"]) >= 2
    assert f"{lab['links']['mean_error']:.2%}" in done.stdout


def test_the_committed_result_is_within_the_limits_and_quoted() -> None:
    labs = json.loads(RESULT.read_text())["labs"]
    assert [(lab["hosts"], lab["devices"]) for lab in labs] == [(4, 8), (8, 16), (16, 32)]
    text = (ROOT / "docs" / "reference" / "lab.md").read_text()
    for lab in labs:
        links, shared, pace = lab["links"], lab["shared"], lab["pace"]
        assert links["max_error"] <= 0.10 and pace["max_error"] <= 0.02 and lab["good"]
        cells = [f"{part['mean_error']:.1%} ({part['max_error']:.1%})" for part in (links, shared, pace)]
        assert f"| {lab['hosts']} | {lab['devices']} | {' | '.join(cells)} |" in text
