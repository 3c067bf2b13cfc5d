"""`benchmarks/planning/joint_search.py --quick` runs; its requests and pins are drawn alike each time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.planning.joint_search import FIXES, draw_pins, draw_requests
from pipefit.plan.request.constraints import KEYS

ROOT = Path(__file__).parents[3]


def test_requests_and_pins_are_seeded() -> None:
    assert list(draw_requests(8)) == list(draw_requests(8))
    assert len({request.text for request in draw_requests(30)}) > 25
    drawn = [draw_pins(random.Random(number)) for number in range(50)]
    assert drawn == [draw_pins(random.Random(number)) for number in range(50)]
    assert {*FIXES} <= {*KEYS} and {text.partition("=")[0] for pins in drawn for text in pins} == {*FIXES}


@pytest.mark.slow
def test_quick_compares_two_requests(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.planning.joint_search", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {"commit", "date", "machine", "packages", "command", "python"} <= set(result["provenance"])
    assert len(result["rows"]) == 2 and all(len(row["pins"]) == 2 for row in result["rows"])
    assert result["outcomes"].get("slower", 0) >= 1 and "faster" not in result["outcomes"]
    assert done.stdout.count("| llama-3.2-1b on 2x") == 2
