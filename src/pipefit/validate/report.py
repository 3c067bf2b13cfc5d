"""Figures of published runs beside their predictions: rows, groups, and groups with a calibration on a few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean

from pipefit.validate.fit import fit_calibration, predict_calibrated
from pipefit.validate.runs import MeasuredRun, PlannedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One published run and its predictions."""

    name: str
    set: str
    group: str
    model: str
    is_fitted: bool
    "Whether the constants of data sheets are fitted to this run."
    published_s: float
    predicted_s: float
    "From data sheets."
    calibrated_s: float | None = None
    "With a calibration on other runs of its group; None for those runs, and without a calibration."

    @property
    def error(self) -> float:
        """(predicted - published) / published."""
        return self.predicted_s / self.published_s - 1

    @property
    def calibrated_error(self) -> float | None:
        """The same with the calibration."""
        return None if self.calibrated_s is None else self.calibrated_s / self.published_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """Errors of the runs of one group."""

    runs: int
    mean_error: float
    "Mean of the absolute relative errors."
    bias: float
    "Mean of the relative errors."
    largest_error: float
    rank_correlation: float | None
    "Spearman's, of published and predicted step times; None below three runs."
    calibrated_on: int = 0
    calibrated_error: float | None = None
    "Mean of the absolute errors of the other runs with the calibration."


def predict_result(run: MeasuredRun, planned: PlannedRun) -> RunResult:
    """Return the figures of a run from data sheets."""
    prediction = planned.plan.prediction
    assert prediction is not None, "a plan that was made has its prediction"
    return RunResult(
        name=run.name,
        set=run.set,
        group=run.group,
        model=run.model,
        is_fitted=run.is_fitted,
        published_s=run.step_s,
        predicted_s=prediction.step_s,
    )


def calibrate_group(
    results: Sequence[RunResult], planned: Sequence[PlannedRun], count: int, progress: Callable[[str], None]
) -> list[RunResult]:
    """Return the results of one group, with a calibration on `count` of its runs, evenly spread, for the others."""
    if len(results) <= count:
        return list(results)
    used = {index * len(results) // count for index in range(count)}
    calibration = fit_calibration([planned[index] for index in sorted(used)], progress)
    return [
        result if index in used else replace(result, calibrated_s=predict_calibrated(planned[index], calibration))
        for index, result in enumerate(results)
    ]


def calibrate_groups(
    results: Sequence[RunResult], planned: Sequence[PlannedRun], count: int, progress: Callable[[str], None]
) -> list[RunResult]:
    """Return `calibrate_group` of every group, one after the other."""
    calibrated = []
    for name in dict.fromkeys(result.group for result in results):
        progress(f"calibrating {name}")
        members = [index for index, result in enumerate(results) if result.group == name]
        chosen = ([results[index] for index in members], [planned[index] for index in members])
        calibrated += calibrate_group(*chosen, count, progress)
    return calibrated


def summarize_groups(results: Sequence[RunResult]) -> dict[str, GroupSummary]:
    """Return the errors of every group."""
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(result.group, []).append(result)
    return {name: _summarize_group(members) for name, members in groups.items()}


def _summarize_group(members: Sequence[RunResult]) -> GroupSummary:
    errors = [result.error for result in members]
    calibrated = [abs(error) for result in members if (error := result.calibrated_error) is not None]
    return GroupSummary(
        runs=len(members),
        mean_error=mean(map(abs, errors)),
        bias=mean(errors),
        largest_error=max(errors, key=abs),
        rank_correlation=rank_correlation([(result.published_s, result.predicted_s) for result in members]),
        calibrated_on=len(members) - len(calibrated) if calibrated else 0,
        calibrated_error=mean(calibrated) if calibrated else None,
    )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation; None for fewer than three pairs."""
    if len(pairs) < 3:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr([first for first, _ in pairs], [second for _, second in pairs]).statistic)


def result_cells(result: RunResult) -> tuple[str, ...]:
    """Return the cells of a run: name, published, predicted, error, and with the calibration."""
    calibrated = result.calibrated_error
    return (
        result.name,
        f"{result.published_s:.4g} s",
        f"{result.predicted_s:.4g} s",
        f"{result.error:+.1%}",
        "" if calibrated is None else f"{calibrated:+.1%}",
    )


def group_cells(name: str, summary: GroupSummary) -> tuple[str, ...]:
    """Return the cells of a group: name, runs, errors, rank correlation, and with the calibration."""
    calibrated, ranks = summary.calibrated_error, summary.rank_correlation
    return (
        name,
        str(summary.runs),
        f"{summary.mean_error:.1%}",
        f"{summary.bias:+.1%}",
        f"{summary.largest_error:+.1%}",
        "" if ranks is None else f"{ranks:.2f}",
        "" if calibrated is None else f"{calibrated:.1%} of {summary.runs - summary.calibrated_on}",
    )


def result_data(results: Sequence[RunResult]) -> dict[str, object]:
    """Return rows and groups as JSON data."""
    rows: list[Mapping[str, object]] = [
        {**asdict(result), "error": result.error, "calibrated_error": result.calibrated_error} for result in results
    ]
    return {"groups": {name: asdict(group) for name, group in summarize_groups(results).items()}, "runs": rows}
