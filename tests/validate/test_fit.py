"""Factors fitted to runs whose step times are predictions with known factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest

from pipefit.cluster import open_cluster
from pipefit.cluster.calibration import ClusterCalibration, DeviceFactors
from pipefit.model.registry import open_model
from pipefit.plan.types import Job
from pipefit.validate.fit import fit_calibration, predict_calibrated
from pipefit.validate.runs import MeasuredRun, PlannedRun, plan_run


@lru_cache(maxsize=1)
def planned_runs() -> tuple[PlannedRun, ...]:
    """Six runs of a small model on H100: alone, FSDP, tensor parallelism, over a slow network, short and long."""
    requests = (
        ("1xH100", 8, 2048, "dp=1"),
        ("8xH100", 16, 2048, "fsdp=8"),
        ("8xH100", 16, 512, "dp=2 tp=4"),
        ("2x8xH100:100Gbit/s", 32, 1024, "dp=16 zero=1"),
        ("2x8xH100:100Gbit/s", 16, 4096, "fsdp=16"),
        ("4xH100", 16, 1024, "pp=4"),
    )
    model = open_model("llama-3.2-1b")
    runs = [
        MeasuredRun(
            name=f"run {number}", set="mine", group="mine", model="llama-3.2-1b", source="llama-3.2-1b",
            cluster=open_cluster(cluster), job=Job(batch=batch, sequence=sequence, precision="bfloat16"),
            fix=tuple(fix.split()), step_s=1.0,
        )
        for number, (cluster, batch, sequence, fix) in enumerate(requests)
    ]  # fmt: skip
    return tuple(plan_run(run, model) for run in runs)


def measured_with(truth: ClusterCalibration, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs with the step times that these factors give."""
    return [replace(run, measured_s=predict_calibrated(run, truth)) for run in runs]


def test_a_fit_finds_the_factors_that_made_the_times() -> None:
    truth = ClusterCalibration(devices={"H100": DeviceFactors(compute=0.8, memory=0.85)}, links=0.7)
    runs = measured_with(truth, planned_runs())
    fitted = fit_calibration(runs)
    assert fitted.devices["H100"].compute < 0.95 and fitted.devices["H100"].memory < 0.95
    assert fitted.links == pytest.approx(0.7, rel=0.1)
    for run, result in zip(runs, fitted.runs, strict=True):
        assert result.measured_s == run.measured_s and result.name == run.name
        assert result.data_sheet_s == pytest.approx(run.predict_step())
        assert result.data_sheet_s < result.measured_s, "the data sheet is faster"
        assert result.calibrated_s == pytest.approx(run.measured_s, rel=0.05)
        assert result.calibrated_s == pytest.approx(predict_calibrated(run, fitted))
        assert result.left_out_s == pytest.approx(run.measured_s, rel=0.1)


def test_times_of_data_sheets_leave_all_factors_at_one() -> None:
    runs = [replace(run, measured_s=run.predict_step()) for run in planned_runs()[:3]]
    assert all(factor == pytest.approx(1.0, abs=1e-6) for _, factor in fit_calibration(runs).factors())


def test_runs_of_one_device_do_not_move_the_links() -> None:
    truth = ClusterCalibration(devices={"H100": DeviceFactors(compute=0.7, memory=0.7)}, links=0.5)
    (run,) = measured_with(truth, planned_runs()[:1])
    fitted = fit_calibration([run])
    assert fitted.links == pytest.approx(1.0, abs=1e-9)
    assert fitted.runs[0].left_out_s is None
    assert run.predict_step() < 0.75 * run.measured_s
    assert fitted.runs[0].calibrated_s == pytest.approx(run.measured_s, rel=0.08)


def test_progress_is_told() -> None:
    told: list[str] = []
    fit_calibration(planned_runs()[:1], told.append)
    assert told[0].startswith("step 1 of 4: mean error")
