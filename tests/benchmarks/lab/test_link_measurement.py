"""`benchmarks/profiling/links.py --lab`: a profile in a lab finds the links that the lab was given; what is committed
and quoted is what was found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.lab_toys import needs_lab

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"


@needs_lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_profile_in_a_lab_finds_its_links(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.profiling.links", "--lab", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (lab,) = json.loads(out.read_text())["lab"]
    assert lab["hosts"] == 4
    assert lab["bandwidth_mean_error"] < 0.15, "busy machines disturb; the committed result is held to 5 %"
    assert lab["slow_port_found_bytes_per_s"] == pytest.approx(2e6, rel=0.2)


def test_the_committed_result_recovers_the_links_and_is_quoted() -> None:
    labs = json.loads((RESULTS / "link_measurement_lab.json").read_text())["lab"]
    own = [lab for lab in labs if lab["kind"] == "own"]
    assert [lab["hosts"] for lab in own] == [4, 8, 16]
    text = (ROOT / "docs" / "design" / "profiling.md").read_text()
    assert all(lab["bandwidth_mean_error"] <= 0.05 for lab in labs)
    for lab in own:
        cells = f"| {lab['hosts']} | {lab['rounds']} | {lab['bandwidth_mean_error']:.1%} "
        assert cells + f"({lab['bandwidth_max_error']:.1%}) |" in text


def test_the_committed_labs_of_other_kinds_are_quoted() -> None:
    labs = json.loads((RESULTS / "link_measurement_lab.json").read_text())["lab"]
    text = (ROOT / "docs" / "design" / "profiling.md").read_text()
    (racks,) = (lab for lab in labs if lab["kind"] == "racks")
    assert racks["hosts"] == 16 and racks["rounds"] < racks["full_rounds"] and racks["predicted"]
    assert f"{racks['rounds']} of {racks['full_rounds']} rounds" in text
    assert f"{racks['predicted_mean_error']:.1%} for the {racks['predicted']} links that nobody measured" in text
    for mild in (lab for lab in labs if lab["kind"] == "mild"):
        ((given, up, _),) = mild["uplinks_given"]
        ((found, out, into),) = mild["uplinks_found"]
        assert found == given and abs(out / up - 1) < 0.1 and abs(into / up - 1) < 0.1
        assert f"{up / 1e6:.1f} MB/s was found as {out / 1e6:.1f} out and {into / 1e6:.1f} in" in text


def test_the_committed_table_is_quoted() -> None:
    rows = json.loads((RESULTS / "link_measurement.json").read_text())["simulated"]
    text = (ROOT / "docs" / "design" / "profiling.md").read_text()
    for row in rows:
        full, told, few = row["tournament_mean"], row["tournament_told_apart"], row["chosen"]
        cells = [f"{part['mean_error']:.1%} ({part['max_error']:.1%})" for part in (full, told, few)]
        invented = [f"{part['false_structure']:.1%}" for part in (full, told, few)]
        everything = " (all)" if few["everything_measured"] else ""
        assert (
            f"| {row['cluster']} | {row['hosts']} | {full['rounds']} | {cells[0]}, {invented[0]} | "
            f"{cells[1]}, {invented[1]} | {few['rounds']}{everything} | {cells[2]}, {invented[2]} |" in text
        )
