"""The committed figures meet the targets, are those that the code makes today, and are those that the page quotes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipefit.validate.records import ValidationResult
from pipefit.validate.report import round_to

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "validation.json").read_text())
    return data


def test_the_committed_result_meets_every_target(committed: dict[str, Any]) -> None:
    targets = [target for result in committed["results"] for target in result["targets"]]
    assert len(targets) == 9 and all(target["met"] for target in targets)
    assert committed["processor_seconds"] < 30
    assert {"commit", "date", "machine", "packages", "command", "python"} <= committed["provenance"].keys()
    assert sorted(committed["vtrain_other_seeds"]) == ["1", "2", "3", "4", "5"]


def test_the_committed_result_is_what_the_code_gives(
    committed: dict[str, Any], results: dict[tuple[str, str], ValidationResult]
) -> None:
    for data in committed["results"]:
        result = results[data["set"], data["quantity"]]
        for key, value in data["summary"].items():
            assert result.summary[key] == pytest.approx(value, rel=1e-3, abs=1e-7), key
        assert data["fitted_constants"] == result.constants
        for row, made in zip(data.get("rows", ()), result.rows, strict=False):
            assert (row["name"], row["published"]) == (made.name, made.published)
            assert round_to(made.predicted) == pytest.approx(row["predicted"], rel=1e-4)


def test_the_documented_figures_are_the_committed_ones(committed: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "results" / "validation.md").read_text()
    summaries = {(data["set"], data["quantity"]): data for data in committed["results"]}
    time, memory, held = (
        summaries[key] for key in (("selene", "iteration time"), ("gh200", "peak memory"), ("vtrain", "iteration time"))
    )
    formula, gh200 = summaries["selene", "memory by formula"], summaries["gh200", "iteration time"]
    size = summaries["vtrain", "iteration time, hidden 1024 to 2048"]
    rows = {
        "one model left out at a time: mean error": (time, "mean error"),
        "| | largest error |": (time, "largest error"),
        "by formula: largest error": (formula, "largest error"),
        "micro-batch 8: mean error": (gh200, "mean error, micro-batch 8"),
        "reported apart: mean error": (gh200, "mean error, smaller micro-batches (apart)"),
        "10 plans: mean error": (memory, "mean error"),
        "largest error below the measured": (memory, "largest error below"),
        "held-out keys, worst of four quarters: mean error": (held, "mean error, worst quarter"),
        "physical constants alone, mean of four": (held, "mean error of the physical constants alone"),
        "regret of the best-predicted plan, worst quarter": (held, "regret of the best-predicted, worst quarter"),
        "plan, physical constants alone, mean": (held, "regret of the physical constants alone, mean"),
        "hidden 1024 to 2048: mean error": (size, "mean error"),
    }
    lines = page.splitlines()
    for words, (data, key) in rows.items():
        found = [line for line in lines if line.startswith("|") and words in line]
        assert len(found) == 1, words
        assert f"| {data['summary'][key]:.2%} |" in found[0], (found[0], data["summary"][key])
    assert f"| {held['fitted_constants']} |" in page
    other = committed["vtrain_other_seeds"].values()
    text = " ".join(page.split())
    for key in ("mean error, worst quarter", "regret of the best-predicted, worst quarter"):
        spread = sorted(each[key] for each in other)
        assert f"between {spread[0]:.2%} and {spread[-1]:.2%}" in text
    spread = sorted(each["regret of the best-predicted, mean"] for each in other)
    assert f"between {spread[0]:.2%} and {spread[-1]:.2%})" in text
    assert f"at most {max(each['regret of the best of five, worst quarter'] for each in other):.2%}" in text
    assert f"({memory['fitted']['constant MB'][0] / 1e3:.2f} GB)" in text


@pytest.mark.slow
def test_quick_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.predictions.validation", "--quick", "--json", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "target met" in done.stdout and len(json.loads(out.read_text())["results"]) == 6
    assert str(tmp_path) not in out.read_text() and str(ROOT) not in out.read_text()
