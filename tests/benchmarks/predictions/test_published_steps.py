"""Step times of published runs from data sheets: the committed errors, the constants, and what is fitted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks.harness import read_result
from benchmarks.predictions.published_steps import (
    FITTED,
    START,
    configuration_rows,
    fit_constants,
    foundry_rows,
    plan_rows,
)
from pipefit.cluster import kinds, parse_spec
from pipefit.cluster.catalogue import find_sheet

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return read_result(ROOT / "benchmarks" / "results" / "published_steps.json")


def test_published_runs_are_predicted_within_eight_percent(committed: dict[str, Any]) -> None:
    groups = committed["groups"]
    assert {name: group["rows"] for name, group in groups.items()} == {
        "foundry A100-40": 33,
        "foundry A100-80": 24,
        "foundry H100": 38,
        "sc21 A100-80": 6,
        "selene A100-80": 8,
        "titan H100": 4,
    }
    assert all(group["mean_error"] < 0.08 for name, group in groups.items() if not name.startswith("sc21"))
    for name, group in groups.items():
        errors = [abs(row["error"]) for row in committed["rows"] if row["group"] == name]
        assert group["mean_error"] == pytest.approx(mean(errors), abs=1e-4)


def test_models_left_out_of_the_fit_are_predicted_within_eight_percent(committed: dict[str, Any]) -> None:
    models = committed["left_out"]["models"]
    assert set(models) == {row["model"] for row in committed["rows"] if row["fitted"]}
    errors = [entry["mean_error"] for entry in models.values()]
    assert mean(errors) < 0.08 and max(errors) < 0.12
    assert {row["row"] for row in committed["rows"] if row["fitted"]} == {
        row["row"] for row in committed["rows"] if row["row"].startswith(FITTED)
    }
    assert not any(row["fitted"] for row in committed["rows"] if "530b" in row["row"] or "sc21" in row["row"])


def test_the_constants_of_data_sheets_are_those_of_the_fit(committed: dict[str, Any]) -> None:
    fitted = committed["left_out"]["constants"]
    assert kinds.PRODUCT_TRAFFIC == fitted["product_traffic"] == START.product_traffic
    assert pytest.approx(fitted["bandwidth_share"], rel=0.03) == kinds.BANDWIDTH_SHARE
    assert pytest.approx(fitted["attention_share"], rel=0.03) == kinds.ATTENTION_SHARE
    assert pytest.approx(fitted["hopper_attention_share"], rel=0.03) == find_sheet("H100").attention_share
    assert pytest.approx(fitted["overlap"], rel=0.03) == kinds.OVERLAP


def test_predictions_are_those_of_today(committed: dict[str, Any], tmp_path: Path) -> None:
    """Of eight devices and one of 128; a plan of a device kind with the same constants has the same step."""
    names = {"foundry-760m-8-2048-92", "foundry-13b-8-2048-44", "foundry-3b-128-2048-8", "selene-22b-selective"}
    known = {row["row"]: row["predicted_s"] for row in committed["rows"]}
    rows = [row for row in (*configuration_rows(tmp_path), *foundry_rows(tmp_path)) if row.name in names]
    entries = list(plan_rows(rows))
    assert len(entries) == len(names)
    for entry in entries:
        assert entry.predicted_s() == pytest.approx(known[entry.row.name], abs=1e-4)
        assert entry.predicted_s(START) == pytest.approx(entry.predicted_s(), rel=1e-9)


def test_a_fit_finds_the_constants_that_made_the_times(tmp_path: Path) -> None:
    """Step times are replaced by predictions with other constants; one device kind determines its share alone."""
    names = {f"foundry-760m-8-{size}" for size in ("2048-92", "8192-86", "32768-84", "512-94")}
    entries = list(plan_rows(row for row in foundry_rows(tmp_path) if row.name in names))
    wanted = replace(START, bandwidth_share=0.5, attention_share=0.25)
    for entry in entries:
        entry.row = replace(entry.row, step_s=entry.predicted_s(wanted))
    reached = fit_constants(entries, replace(START, attention_share=0.3))
    assert reached.bandwidth_share == pytest.approx(0.5, rel=0.02)
    assert reached.attention_share == pytest.approx(0.25, rel=0.02)


def test_constants_change_a_data_sheet_kind_and_nothing_else() -> None:
    for name in ("H100", "A100-80"):
        kind = parse_spec(f"1x{name}").kinds[name]
        assert START.change_kind(kind) == kind


@pytest.mark.slow
def test_quick_predicts_eight_rows() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.predictions.published_steps", "--quick"],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mean error" in done.stdout and len(done.stdout.splitlines()) >= 9
