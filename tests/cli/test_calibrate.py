"""`pipefit calibrate`, plans with its file, and `pipefit validate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_a_plan_with_a_calibration_is_slower_and_opened_again(pipefit, tmp_path: Path) -> None:
    table, file, plan = tmp_path / "runs.csv", tmp_path / "mine.json", tmp_path / "plan.json"
    request = (
        "plan",
        "--model",
        "gpt2",
        "--cluster",
        "2xH100",
        "--batch",
        "16",
        "--seq",
        "1024",
        "--fix",
        "dp=2",
    )
    code, out, err = pipefit(*request, "--json", "-o", str(plan))
    assert code == 0, err
    step_s = json.loads(plan.read_text())["prediction"]["step_s"]
    table.write_text(f"model,cluster,fix,batch,sequence,step_s\ngpt2,2xH100,dp=2,16,1024,{1.5 * step_s}\n")
    code, out, err = pipefit("calibrate", str(table), "-o", str(file))
    assert code == 0, err
    assert "runs.csv, line 2" in out and "H100.compute" in out and f"--calibration {file}" in out
    assert "One run tells no error on others" in out and "reading the model" in err
    code, out, err = pipefit(*request, "--calibration", str(file), "-o", str(plan))
    assert code == 0, err
    assert json.loads(plan.read_text())["prediction"]["step_s"] == pytest.approx(1.5 * step_s, rel=0.08)
    assert json.loads(plan.read_text())["cluster"] == f"2xH100@{file}"
    assert pipefit("simulate", str(plan))[0] == 0, "the cluster is opened by its name"
    code, out, _ = pipefit("calibrate", str(table), str(table), "--json", "--quiet")
    data = json.loads(out)
    assert code == 0 and [run["name"] for run in data["runs"]] == ["runs.csv, line 2"] * 2
    assert data["runs"][0]["left_out_s"] == pytest.approx(1.5 * step_s, rel=0.1)


def test_what_is_no_run_has_exit_code_2(pipefit, tmp_path: Path) -> None:
    code, _, err = pipefit("calibrate", str(tmp_path / "none"))
    assert code == 2 and "not a measured run" in err and "PLAN.json=LOG" in err
    code, _, err = pipefit("plan", "--model", "tiny-llama", "--cluster", "2xH100", "--batch", "4", "--seq", "64",
                           "--calibration", str(tmp_path / "none.json"))  # fmt: skip
    assert code == 2 and "cannot be read" in err


def test_published_runs_are_predicted(pipefit) -> None:
    code, out, err = pipefit("validate", "--set", "torchtitan", "--all", "--calibrate", "2")
    assert code == 0, err
    assert "titan-8b-8" in out and "titan H100" in out and "fitted to 4 of these runs" in out
    row = next(line for line in out.splitlines() if "titan-8b-8 " in line)
    assert row.split()[1:3] == ["2.457", "s"] and row.split()[-1].endswith("%")
    assert "% of 2" in out and "4 of 4 runs" in err
    code, out, _ = pipefit("validate", "--set", "torchtitan", "--json", "--quiet")
    data = json.loads(out)
    assert code == 0 and data["groups"]["titan H100"]["runs"] == 4 and len(data["runs"]) == 4
    assert abs(data["groups"]["titan H100"]["mean_error"]) < 0.08


def test_bad_options_of_validate(pipefit) -> None:
    code, _, err = pipefit("validate", "--set", "titan")
    assert code == 2 and "no such set" in err and "torchtitan-fp8" in err
    code, _, err = pipefit("validate", "--calibrate", "-1")
    assert code == 2 and "--calibrate" in err
