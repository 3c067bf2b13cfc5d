"""Published models of the benchmark: its quick run, its targets, and the committed result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import load_result
from benchmarks.models.published import CAPTURE_LIMIT_S, layout_text, missed_targets, read_models
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.sizing.sizes import layout_words

ROOT = Path(__file__).resolve().parents[3]
ROW = {"error": 0.0, "tolerance": 1e-3, "open_cpu_s": 5.0, "search_cpu_s": 4.0, "step_s": 1.0}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"error": -0.002}, ["parameters"]),
        ({"open_cpu_s": 21.0}, ["capture"]),
        ({"search_cpu_s": 5.5}, ["search"]),
    ],
)
def test_a_missed_target_is_named(change: dict[str, float], missed: list[str]) -> None:
    assert missed_targets({**ROW, **change}) == missed


def test_a_model_without_a_plan_misses_it() -> None:
    row = {name: value for name, value in ROW.items() if name != "step_s"}
    assert missed_targets(row) == ["plan"]


def test_a_layout_is_that_of_the_decisions_in_a_plan() -> None:
    config = ParallelConfig(replicas=(1, 1), shards=(1, 1), sharding="expert", stages=2, sharded_state="optimizer")
    assert layout_text(config.to_constraints((3,))) == "dp=2 ep=2 pp=2 zero=1, 1f1b" == layout_words(config)


@pytest.mark.slow
def test_quick_plans_a_native_and_a_captured_model(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.models.published", "--quick", "--json", tmp_path / "result"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "result").read_text())["models"]
    assert [row["read"] for row in rows.values()] == ["native", "captured"]
    for row in rows.values():
        assert row["devices"] == 64 and row["peak_bytes"] < row["limit_bytes"]
        assert row["read"] == "native" or row["cached_cpu_s"] < row["open_cpu_s"]


def test_the_committed_result_has_the_published_parameters() -> None:
    models, rows = read_models(), load_result("published_models")["models"]
    assert len(rows) >= 40 and set(rows) <= set(models)
    for name, row in rows.items():
        assert abs(row["error"]) <= models[name].get("tolerance", 1e-3), name
        assert row["open_cpu_s"] <= CAPTURE_LIMIT_S, name
    assert {row["read"] for row in rows.values() if "step_s" in row} == {"native", "captured"}
