"""The published runs are predicted as well as the project promises, deterministically, and said so as asked."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pipefit.cli import build_app
from pipefit.errors import PipefitError
from pipefit.validate.records import ErrorTarget, ValidationResult, ValidationRow, mean_or_zero
from pipefit.validate.report import as_data, as_text
from pipefit.validate.sets import gh200

Results = dict[tuple[str, str], ValidationResult]

LIMITS = {
    ("selene", "iteration time"): {"mean error": 0.04, "largest error": 0.09},
    ("selene", "memory by formula"): {"largest error": 0.001},
    ("gh200", "iteration time"): {"mean error, micro-batch 8": 0.03},
    ("gh200", "peak memory"): {"mean error": 0.02, "largest error below": 0.04},
    ("vtrain", "iteration time"): {
        "mean error, worst quarter": 0.07,
        "regret of the best-predicted, worst quarter": 0.03,
        "regret of the best of five, worst quarter": 0.005,
    },
    ("vtrain", "iteration time, hidden 1024 to 2048"): {},
}


def test_every_target_is_met(results: Results) -> None:
    assert results.keys() == LIMITS.keys()
    for key, result in results.items():
        assert {target.what: target.limit for target in result.targets} == LIMITS[key]
        for target in result.targets:
            assert target.is_met and 0 <= target.reached <= target.limit, (key, target)


def test_errors_are_those_of_the_rows(results: Results) -> None:
    """The figures again, from published and predicted numbers alone."""

    def off(key: tuple[str, str], part: str = "predicted") -> list[float]:
        return [abs(row.predicted - row.published) / row.published for row in results[key].rows if row.part == part]

    selene = off(("selene", "iteration time"))
    assert len(selene) == 8 and mean_or_zero(selene) <= 0.04 and max(selene) <= 0.09
    assert len(off(("selene", "memory by formula"))) == 12 and max(off(("selene", "memory by formula"))) < 0.001
    times = off(("gh200", "iteration time"))
    assert len(times) == 9 and mean_or_zero(times) <= 0.03
    memory = off(("gh200", "peak memory"))
    assert len(memory) == 10 and mean_or_zero(memory) <= 0.02
    assert len(off(("gh200", "peak memory"), "fitted")) == 5
    assert (
        len(off(("vtrain", "iteration time"))) == 3 * 1440 and mean_or_zero(off(("vtrain", "iteration time"))) <= 0.07
    )


def test_the_number_of_fitted_constants_is_told(results: Results) -> None:
    assert results["selene", "iteration time"].constants == 2
    assert {len(values) for values in results["selene", "iteration time"].fitted.values()} == {4}
    assert results["selene", "memory by formula"].constants == 0
    assert results["gh200", "iteration time"].constants == 1
    assert results["gh200", "peak memory"].constants == 2
    assert results["vtrain", "iteration time, hidden 1024 to 2048"].constants == 7
    # 7 physical constants and two factors for each of at most 32 shapes
    assert 7 < results["vtrain", "iteration time"].constants <= 7 + 2 * 32


def test_physical_constants_alone_are_close_too(results: Results) -> None:
    """Without any factor of a shape: a model of the machine, not a table of what was seen."""
    summary = results["vtrain", "iteration time"].summary
    assert summary["mean error of the physical constants alone"] < 0.08
    assert summary["regret of the physical constants alone, best of five"] < 0.005
    assert results["vtrain", "iteration time, hidden 1024 to 2048"].summary["mean error"] < 0.12


def test_results_repeat_to_the_last_bit(results: Results) -> None:
    assert {(result.set, result.quantity): result for result in gh200.results()}.items() <= results.items()


def test_the_command_prints_rows_split_and_constants() -> None:
    answer = CliRunner().invoke(build_app(), ["validate", "--set", "gh200"])
    assert answer.exit_code == 0
    for text in (
        "published",
        "predicted",
        "delta",
        "fitted constants: 1",
        "split: two constants",
        "N32_D8",
        "target met",
    ):
        assert text in answer.output


def test_the_command_prints_json() -> None:
    answer = CliRunner().invoke(build_app(), ["validate", "--set", "gh200", "--json"])
    assert answer.exit_code == 0
    time, memory = json.loads(answer.output)
    assert (time["set"], time["fitted_constants"], time["row_count"], len(time["rows"])) == ("gh200", 1, 15, 15)
    row = time["rows"][2]
    assert row["delta"] == pytest.approx(row["predicted"] / row["published"] - 1, abs=1e-5)
    assert memory["targets"][0]["met"] is True and "fitted to the 5 plans" in memory["split"]


def test_an_unknown_set_lists_the_known() -> None:
    answer = CliRunner().invoke(build_app(), ["validate", "--set", "selen"])
    assert isinstance(answer.exception, PipefitError)
    assert answer.exception.full_text().splitlines() == [
        "There is no data set of this name.",
        "  where: --set",
        "  seen: 'selen'",
        "  allowed: gh200, selene, vtrain",
        "  try: did you mean 'selene'?",
    ]


def test_a_missed_target_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    import pipefit.validate.sets as sets

    missed = _result(ErrorTarget(what="mean error", reached=0.5, limit=0.1))
    monkeypatch.setattr(sets, "select_sets", lambda names: {"x": lambda: (missed,)})
    answer = CliRunner().invoke(build_app(), ["validate"])
    assert answer.exit_code == 1 and "target MISSED: mean error 50.00%, at most 10.00%" in answer.output


def test_large_results_show_their_worst_rows_unless_all_are_asked_for() -> None:
    rows = tuple(ValidationRow(name=f"row{i}", published=100.0, predicted=100.0 + i) for i in range(80))
    result = _result(ErrorTarget(what="mean error", reached=0.0, limit=0.1), rows)
    short, long = as_text(result), as_text(result, show_all=True)
    assert "the 10 worst of 80 rows" in short and "row79 " in short and "row69 " not in short
    assert "row0 " in long and len(long.splitlines()) - len(short.splitlines()) == 69
    assert len(as_data(result)["rows"]) == 80 and "rows" not in as_data(result, rows=False)


def _result(
    target: ErrorTarget, rows: tuple[ValidationRow, ...] = (ValidationRow(name="a", published=1.0, predicted=1.5),)
) -> ValidationResult:
    return ValidationResult(
        set="x",
        quantity="time",
        unit="s",
        source="nowhere",
        split="none",
        fitted={},
        constants=0,
        rows=rows,
        summary={},
        targets=(target,),
    )
