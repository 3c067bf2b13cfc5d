"""The benchmark of what schedules hold runs and is within its limit; docs/reference/schedules.md quotes the committed
result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.gloo
@pytest.mark.slow
def test_quick_benchmark(tmp_path: Path) -> None:
    out, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    words = [sys.executable, "-m", "benchmarks.memory.families", "--quick", "--json", out, "--plot", plot]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert set(result["families"]) == {"1f1b", "v-half", "v-min"} and "commit" in result["provenance"]
    shares = {name: case["share_of_1f1b"] for name, case in result["families"].items()}
    assert shares["v-min"] < shares["v-half"] < shares["1f1b"] == 1.0
    for name, case in result["families"].items():
        assert case["largest_error"] <= 0.01 and len(case["measured_bytes"]) == 4
        assert name in done.stdout
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_the_page_quotes_the_committed_result() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "schedule_memory.json").read_text())
    page = (ROOT / "docs" / "reference" / "schedules.md").read_text()
    section = page[page.index("## Measured memory") : page.index("## Building blocks")]
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) % \|$", section, flags=re.MULTILINE)
    assert {name for name, _, _ in rows} == set(result["families"])
    for name, share, error in rows:
        case = result["families"][name]
        assert share == f"{case['share_of_1f1b']:.2f}" and error == f"{100 * case['largest_error']:.2f}"
    assert (result["devices"], result["microbatches"]) == (8, 16)
    assert max(case["largest_error"] for case in result["families"].values()) <= result["limit"]
