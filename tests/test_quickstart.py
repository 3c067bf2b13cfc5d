"""`bin/quickstart` as a newcomer runs it, with few steps: measure, plan, explain, train, report."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pipefit.cluster import load_cluster
from pipefit.plan.check.rules import load_plan

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.skipif(not (ROOT / ".venv" / "pipefit-setup").exists(), reason="needs what bin/setup installs")
def test_quickstart_from_measuring_to_the_report(tmp_path: Path) -> None:
    environment = {**os.environ, "STEPS": "4", "GLOO_SOCKET_IFNAME": "lo"}
    words = [str(ROOT / "bin" / "quickstart"), str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    cluster = load_cluster(tmp_path / "cluster.json")
    assert cluster.measured is not None and len(cluster.measured.layers) >= 4 and cluster.hosts[0].devices in (2, 4)
    plan = load_plan(tmp_path / "plan.json")
    assert (
        plan.prediction is not None
        and plan.decisions["stages"] == "2"
        and len(plan.used_devices) == cluster.hosts[0].devices
    )
    assert any("measured" in note for note in plan.prediction.assumptions)
    assert "critical path: " in done.stdout and "lower bound" in done.stdout and "with better hardware: " in done.stdout
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in record for record in records) == 4
    assert "step time: " in done.stdout and " measured (" in done.stdout and "peak memory of a device: " in done.stdout
    html = (tmp_path / "report.html").read_text()
    assert plan.content_hash in html and "predicted" in html and "measured" in html
