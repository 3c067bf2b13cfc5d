"""The published runs that the package contains, their groups, and a calibration on a part of a group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipefit.errors import FormatError
from pipefit.validate import report
from pipefit.validate.report import GroupSummary, RunResult, calibrate_group, rank_correlation, summarize_groups
from pipefit.validate.sets import SETS, choose_sets, published_runs


def test_every_set_has_runs_and_nothing_is_fitted_to_fp8_or_float32(tmp_path: Path) -> None:
    runs = published_runs(SETS, tmp_path)
    assert list(dict.fromkeys(run.set for run in runs)) == list(SETS)
    assert len(runs) > 150 and len({run.name for run in runs}) == len(runs)
    assert not any(run.is_fitted for run in runs if run.set.endswith("fp8") or run.set == "gh200")
    assert {run.job.precision for run in runs if run.set == "gh200"} == {"float32"}
    assert all(run.step_s > 0 for run in runs)
    assert {run.set for run in published_runs(["gh200"], tmp_path)} == {"gh200"}


def test_sets_are_chosen_by_name() -> None:
    assert choose_sets([]) == tuple(SETS) and choose_sets(["megatron"]) == ("megatron",)
    with pytest.raises(FormatError, match=r"no such set[\s\S]*titan[\s\S]*torchtitan"):
        choose_sets(["titan"])


def results(predicted: tuple[float, ...]) -> list[RunResult]:
    return [
        RunResult(
            name=str(number), set="set", group="group", model="m", is_fitted=False, published_s=number + 1.0,
            predicted_s=value,
        )
        for number, value in enumerate(predicted)
    ]  # fmt: skip


def test_a_group_is_summarized() -> None:
    members = results((1.1, 1.8, 3.0))
    (group,) = summarize_groups(members).values()
    assert group == GroupSummary(
        runs=3, mean_error=pytest.approx(0.2 / 3), bias=pytest.approx(0.0), largest_error=pytest.approx(0.1),
        rank_correlation=pytest.approx(1.0),
    )  # fmt: skip
    assert rank_correlation([(1, 1), (2, 2)]) is None
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1.0)


def test_a_calibration_predicts_the_other_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    members, used = results((1.5, 3.0, 4.5, 6.0, 7.5, 9.0)), []
    monkeypatch.setattr(report, "fit_calibration", lambda runs, progress: used.extend(runs) or "factors")
    monkeypatch.setattr(report, "predict_calibrated", lambda run, factors: run + 1.0)
    calibrated = calibrate_group(members, [0, 1, 2, 3, 4, 5], 3, lambda text: None)  # type: ignore[arg-type]
    assert used == [0, 2, 4]
    assert [result.calibrated_s for result in calibrated] == [None, 2.0, None, 4.0, None, 6.0]
    (group,) = summarize_groups(calibrated).values()
    assert (group.calibrated_on, group.calibrated_error) == (3, pytest.approx(0.0))
    assert calibrate_group(members[:3], [0, 1, 2], 3, lambda text: None) == members[:3]  # type: ignore[arg-type]
    assert replace(members[0], calibrated_s=1.0).calibrated_error == 0.0
