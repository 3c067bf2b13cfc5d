"""The benchmark of memory estimates runs; docs/design/memory.md quotes the committed result, which is within its
limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipefit.run.verify.record import run_configuration

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_quick_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    words = [sys.executable, "-m", "benchmarks.memory.estimates", "--quick", "--json", out]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment)
    result = json.loads(out.read_text())
    assert "corrected" in done.stdout and "commit" in result["provenance"]
    assert {run["case"]["devices"] for run in result["judged"]} == {8} and len(result["judged"]) == 6
    assert result["sliced_and_recomputed"]["runs"] == 2
    figures = result["figures"]["corrected"]
    assert figures["mean error"] <= 0.04 and figures["under-estimates beyond the margin"] == 0
    assert figures["mean error"] < result["figures"]["analytic"]["mean error"]


def test_the_page_quotes_the_committed_result() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "memory_estimates.json").read_text())
    page = (ROOT / "docs" / "design" / "memory.md").read_text()
    for name, one in result["figures"].items():
        shares = [
            one[f"{who}{where}"]
            for who in ("refused although they fit", "accepted although they do not fit")
            for where in ("", ", limits within 10 %")
        ]
        errors = [one["mean error"], one["largest under-estimate"], one["largest over-estimate"]]
        row = " | ".join([f"| {name}", *(f"{error:.2%}" for error in errors), *(f"{share:.1%}" for share in shares)])
        assert row.replace("%", " %") in page
    corrected, limits = result["figures"]["corrected"], result["limits"]
    assert all(corrected[name] <= limit for name, limit in limits.items())
    assert corrected["runs"] >= 60 and result["correction"]["most_devices"] <= 4
    assert {run["case"]["devices"] for run in result["judged"]} == {8, 16}
    assert f"{result['correction']['plans']} plans" in page and f"{corrected['runs']} plans" in page
    assert result["real"] and all(one["largest_difference"] <= 0.002 for one in result["real"])


def test_plans_recorded_by_earlier_versions_are_known_again() -> None:
    from benchmarks.memory.estimates import Case, plan_of

    result = json.loads((ROOT / "benchmarks" / "results" / "memory_estimates.json").read_text())
    # The last ones predate the price of causal attention, those of GPT-2 the order of its projections.
    for run in (result["learned"][1], result["learned"][48]):
        assert run_configuration(plan_of(Case(**run["case"]))[0]) == run["plan"]


def test_the_page_quotes_plans_with_slices_and_recomputation() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "memory_sliced.json").read_text())
    page = " ".join((ROOT / "docs" / "design" / "memory.md").read_text().split())
    judged, corrected, limits = result["judged"], result["figures"]["corrected"], result["limits"]
    assert all(run["case"]["slices"] > 1 and run["case"]["recompute"] != "none" for run in judged)
    assert len(judged) >= 20 and {run["case"]["devices"] for run in judged} == {8, 16}
    bare = result["figures"]["analytic, without the assumed workspace"]
    for one, what in ((bare, "without the assumed workspace"), (corrected, "corrected")):
        words = f"{one['mean error']:.2%} on average, {one['largest under-estimate']:.2%} under at most ({what})"
        assert words.replace("%", " %") in page
    assert f"{len(judged)} plans with both" in page
    assert corrected["mean error"] <= limits["mean error"] and not corrected["under-estimates beyond the margin"]
