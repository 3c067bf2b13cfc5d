"""`benchmarks/planning/search_time.py --quick` runs; its mixed clusters are what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planning.search_time import skewed
from pipefit.cluster import parse_spec

ROOT = Path(__file__).parents[3]


def test_mixed_clusters_have_two_kinds_and_links_that_differ() -> None:
    base = parse_spec("64x8xH100:400Gbit/s")
    made, again = skewed(base, "A100-80"), skewed(base, "A100-80")
    assert made == again, "seeded"
    assert [host.kind for host in made.hosts[:4]] == ["H100", "A100-80", "H100", "A100-80"]
    bandwidth = np.array(made.rails[0].bandwidth_bytes_per_s)[~np.eye(64, dtype=bool)]
    assert np.log(bandwidth).std() == pytest.approx(0.35, rel=0.05)
    assert bandwidth.mean() == pytest.approx(50e9, rel=0.05)


@pytest.mark.slow
def test_quick_plans_the_small_cases(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.planning.search_time", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert str(ROOT) not in text and str(tmp_path) not in text
    result = json.loads(text)
    assert {"commit", "date", "machine", "packages", "command", "python"} <= set(result["provenance"])
    assert {*result["cases"]} == {"16 devices, 8B", "16 mixed devices, 8B"}
    uniform, mixed = result["cases"]["16 devices, 8B"], result["cases"]["16 mixed devices, 8B"]
    assert uniform["lower_bound"] < mixed["lower_bound"] <= mixed["predicted_step"]
    assert uniform["predicted_step"] < mixed["predicted_step"] < 2 * uniform["predicted_step"]
    assert mixed["kinds"]["H100"] == 8, "all fast devices are taken"
