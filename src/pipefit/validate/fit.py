"""Fit the factors of a calibration to runs, by the predictions of the same plans.

The logarithm of a step time is nearly linear in the logarithms of the factors, so a few Gauss-Newton steps find them. A
prior draws every factor towards 1, so that a few runs are enough. A factor that they do not determine stays at 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pipefit.cluster.calibration import CalibrationRun, ClusterCalibration, DeviceFactors, calibrate_cluster
from pipefit.cost.types import Array
from pipefit.validate.runs import PlannedRun

ERROR_SPREAD = 0.05
"""Spread of the logarithm of a measured over a calibrated step time: the mean error of models that were left out of the
fit of data sheets (docs/results/validation.md)."""

COMPUTE_SPREAD, MEMORY_SPREAD, LINK_SPREAD = 0.1, 0.2, 0.3
"""Assumed spread of the logarithm of each factor over users' clusters."""

NEWTON_STEPS = 4
DIFFERENCE = 0.02
"""Step of the logarithm of a factor in the finite differences."""

Progress = Callable[[str], None]


def fit_calibration(runs: Sequence[PlannedRun], progress: Progress = lambda text: None) -> ClusterCalibration:
    """Return the factors that fit the step times of the runs, with every run's prediction before and after, and its
    prediction by a fit to the other runs. `progress` receives a text for every step."""
    kinds = sorted({kind.name for run in runs for kind in run.cluster.kinds.values()})
    spreads = np.array([spread for _ in kinds for spread in (COMPUTE_SPREAD, MEMORY_SPREAD)] + [LINK_SPREAD])
    logarithms: Array = np.zeros(len(spreads))
    data_sheet = _predict_runs(runs, kinds, logarithms)
    errors: Array = np.log(data_sheet / _measured(runs))
    slopes: Array = np.zeros((len(runs), len(spreads)))
    for step in range(NEWTON_STEPS):
        progress(f"step {step + 1} of {NEWTON_STEPS}: mean error {float(np.abs(np.expm1(errors)).mean()):.1%}")
        slopes = _prediction_slopes(runs, kinds, logarithms, errors)
        moved = _ridge_solution(slopes, errors - slopes @ logarithms, spreads)
        change, logarithms = float(np.abs(moved - logarithms).max()), moved
        errors = np.log(_predict_runs(runs, kinds, logarithms) / _measured(runs))
        if change < DIFFERENCE / 10:
            break
    calibrated = np.exp(errors) * _measured(runs)
    results = []
    for index, run in enumerate(runs):
        remaining = [row for row in range(len(runs)) if row != index]
        left_out = None
        if remaining:
            part = slopes[remaining]
            without = _ridge_solution(part, errors[remaining] - part @ logarithms, spreads)
            left_out = float(_predict_runs([run], kinds, without)[0])
        results.append(
            CalibrationRun(
                name=run.name,
                measured_s=run.measured_s,
                data_sheet_s=float(data_sheet[index]),
                calibrated_s=float(calibrated[index]),
                left_out_s=left_out,
            )
        )
    return replace(_calibration_of(kinds, logarithms), runs=tuple(results))


def predict_calibrated(run: PlannedRun, calibration: ClusterCalibration) -> float:
    """Return the step time of a run in seconds, predicted with the factors of a calibration."""
    return run.predict_step(lambda cluster: calibrate_cluster(cluster, calibration, run.name))


def _calibration_of(kinds: Sequence[str], logarithms: Array) -> ClusterCalibration:
    values = [math.exp(value) for value in logarithms.tolist()]
    return ClusterCalibration(
        devices={
            kind: DeviceFactors(compute=values[2 * index], memory=values[2 * index + 1])
            for index, kind in enumerate(kinds)
        },
        links=values[-1],
    )


def _predict_runs(runs: Sequence[PlannedRun], kinds: Sequence[str], logarithms: Array) -> Array:
    """Return the predicted step time of every run."""
    calibration = _calibration_of(kinds, logarithms)
    return np.array([predict_calibrated(run, calibration) for run in runs])


def _measured(runs: Sequence[PlannedRun]) -> Array:
    return np.array([run.measured_s for run in runs])


def _prediction_slopes(runs: Sequence[PlannedRun], kinds: Sequence[str], logarithms: Array, errors: Array) -> Array:
    """Return d(log of predicted over measured time) / d(log of factor), [run, factor]."""
    columns = []
    for index in range(len(logarithms)):
        moved = logarithms.copy()
        moved[index] += DIFFERENCE
        columns.append((np.log(_predict_runs(runs, kinds, moved) / _measured(runs)) - errors) / DIFFERENCE)
    return np.stack(columns, axis=1)


def _ridge_solution(slopes: Array, errors_at_one: Array, spreads: Array) -> Array:
    """Return the logarithms of the factors with the least squares of errors and of the factors by their spreads.

    `errors_at_one`: the errors of the runs with all factors 1, by the slopes.
    """
    weighted = slopes.T @ slopes / ERROR_SPREAD**2 + np.diag(1 / spreads**2)
    return np.asarray(np.linalg.solve(weighted, -slopes.T @ errors_at_one / ERROR_SPREAD**2), dtype=np.float64)
