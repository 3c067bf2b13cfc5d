"""`benchmarks/memory/trade.py --quick` runs, and its choices are what the planner says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.gloo
def test_quick_compares_the_choice_with_fixed_schedules(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.memory.trade", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert out.exists(), done.stderr
    text = out.read_text()
    assert str(ROOT) not in text and str(tmp_path) not in text
    result = json.loads(text)
    assert {"commit", "date", "machine", "packages", "command", "python"} <= set(result["provenance"])
    choices = set()
    for case in result["cases"]:
        chosen = case["chosen"]
        choices.add((chosen["schedule"], tuple(chosen["recompute"])))
        assert case["fixed"] or case["do_not_fit"]
        assert 0 < chosen["peak_bytes"] <= case["limit_bytes"]
        assert chosen["measured_s"] > 0.9 * chosen["predicted_s"], "a paced step cannot be faster than its actions"
        for row in case["fixed"]:
            assert row["predicted_s"] >= chosen["predicted_s"] * (1 - 2e-3)
            low, high = row["ratio_95"]
            assert low <= row["ratio"] <= high
        assert case["name"] in done.stdout
    assert len(choices) == len(result["cases"]), "the choice differs from case to case"
