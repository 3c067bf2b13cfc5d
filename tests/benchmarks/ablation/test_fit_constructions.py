"""`benchmarks.ablation.fit_constructions` removes what it says, and docs/results/ablation.md quotes the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.ablation.fit_constructions import REMOVALS, ablate, constructions_of, run_fit, summarise
from benchmarks.ablation.fit_instances import FitCase, uneven_costs, vee_problem

ROOT = Path(__file__).parents[3]
CASE = FitCase("V of three lanes", vee_problem(uneven_costs(3, 1), 1.5, 6), {"moves": 0})


def test_a_name_tells_its_constructions() -> None:
    assert constructions_of("block 1, 1.2, extended, tuned") == {"blocks", "extended", "tuned"}
    assert constructions_of("v-half in memory") == {"family v-half", "families in memory"}
    assert constructions_of("pattern 123 hops 3,1, exact") == {"patterns", "exact"}


def test_what_is_removed_is_gone() -> None:
    """Without moves the winner is a start: without its construction another one wins, and is no faster."""
    record = ablate(CASE)
    assert record is not None
    (label,) = constructions_of(record["winner"]) & {"blocks", "patterns", "families unchanged", "families in memory"}
    rest = run_fit(CASE, REMOVALS[label]())
    assert label not in constructions_of(rest.how)
    loss = rest.time_s / run_fit(CASE, []).time_s - 1
    assert loss >= 0 and record["loss_without"][label] == pytest.approx(loss)


def test_the_page_quotes_the_committed_result() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "fit_ablation.json").read_text(encoding="utf-8"))
    rows = [row for rows in result["problems"].values() for row in rows]
    summary = summarise(rows)
    assert {label: summary[label] for label in result["summary"]} == result["summary"]
    page = (ROOT / "docs" / "results" / "ablation.md").read_text(encoding="utf-8")
    assert f"{len(rows)} problems" in page
    for label, row in result["summary"].items():
        if row["takes_part"]:
            cells = (row["won"], row["best_start_alone"], row["loses_without"], row["gains_without"])
            assert f"| {label} | {row['takes_part']} | {' | '.join(map(str, cells))} | " in page, label
