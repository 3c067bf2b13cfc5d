"""Runs of plans in a lab, without a lab: which plans are run again, and what is written of their steps."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.lab import runs
from benchmarks.lab.runs import Measured


def test_only_plans_whose_run_was_invalid_are_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan a is valid at once, b at the second try, c never."""
    started: list[list[str]] = []
    outcomes = {"a": [True], "b": [False, True], "c": [False] * 3}

    def run_plans(lab: object, plans: list[str], model: object, **options: Any) -> list[Measured]:
        assert options == {"steps": 3}
        started.append(list(plans))
        return [Measured((float(len(started)),), outcomes[plan].pop(0), "", ()) for plan in plans]

    monkeypatch.setattr(runs, "run_plans", run_plans)
    plans: Any = {name: name for name in "abc"}
    measured = runs.run_again(None, plans, None, tries=3, steps=3)  # type: ignore[arg-type]
    assert [plans for plans in started if plans] == [["a", "b", "c"], ["b", "c"], ["c"]]
    assert {name: (run.median_s, run.valid) for name, run in measured.items()} == {
        "a": (1.0, True),
        "b": (2.0, True),
        "c": (3.0, False),
    }


def test_steps_are_written_beside_their_prediction() -> None:
    run = Measured((2.0, 4.0, 3.0), True, "on time", ())
    assert run.beside(3.3) == {
        "measured_s": 3.0,
        "steps_s": [2.0, 4.0, 3.0],
        "predicted_s": 3.3,
        "error": pytest.approx(0.1),
        "valid": True,
        "pace": "on time",
    }
