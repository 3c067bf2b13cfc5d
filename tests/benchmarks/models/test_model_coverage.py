"""The benchmark of model types: a sixth of the types in the slow tier, and the committed result of all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.coverage import ASKED, EXACT, all_types
from benchmarks.models.weight_files import EQUAL

ROOT = Path(__file__).resolve().parents[3]
PARTS, TRIED = 12, (0, 6)
"""Every twelfth type is a part; all of them take too long for continuous integration."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", TRIED)
def test_types_are_planned_and_trained_as_recorded(part: int, tmp_path: Path) -> None:
    kinds, result = all_types()[part::PARTS], tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.models.coverage", "--types", ",".join(kinds), "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert result.exists(), done.stderr[-2000:]
    rows = json.loads(result.read_text())["types"]
    check_rows(rows)
    states = {row["model_type"]: row["state"] for row in rows}
    recorded = {row["model_type"]: row["state"] for row in committed_result()["types"]}
    assert states == {kind: recorded[kind] for kind in kinds}


def committed_result() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "model_coverage.json").read_text())
    return result


def test_nine_of_ten_types_are_planned_and_trained() -> None:
    result = committed_result()
    states = [row["state"] for row in result["types"]]
    assert states.count("native") + states.count("captured") >= ASKED * len(states)
    check_rows(result["types"])


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Planned types are exact; a refusal has a reason and a next step."""
    for row in rows:
        if row["state"] in ("native", "captured"):
            assert max(row["difference"], row["trained"]) <= EXACT, row
            assert row["state"] == "native" or row["weights"] == EQUAL, row
        else:
            assert row["reason"] and (row["next_step"] or row["state"] == "no tiny model"), row
