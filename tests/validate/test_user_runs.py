"""Runs of users: folders, logs beside plans, tables; and what is said of texts that are none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipefit.cluster import open_cluster
from pipefit.cluster.calibration import ClusterCalibration, DeviceFactors, save_calibration
from pipefit.codec import dump_text
from pipefit.errors import PipefitError
from pipefit.model.registry import open_model
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.types import Job, Plan
from pipefit.validate.user_runs import open_user_runs, read_step_times

TITAN = """
[titan] step:  1  loss: 12.2  grad_norm: 1.2  memory: 40.1GiB(42.0%)  tps: 100  tflops: 5.1  mfu: 0.5%
\x1b[31m[titan] step: 10  \x1b[32mloss:  9.9  \x1b[33mmemory: 40.2GiB(42.2%)  tps: 1,024  mfu: 5%\x1b[0m
[titan] step: 20  loss:  8.1  memory: 40.2GiB(42.2%)  tps: 1,024  tflops: 51.0  mfu: 5.2%
"""
MEGATRON = """
 iteration        1/      20 | consumed samples:  16 | elapsed time per iteration (ms): 9000.0 | throughput: 1.0 |
 iteration       10/      20 | consumed samples: 160 | elapsed time per iteration (ms): 250.5 | throughput: 40.0 |
 iteration       20/      20 | consumed samples: 320 | elapsed time per iteration (ms): 249.5 | throughput: 40.0 |
"""


def plan_of(cluster: str = "2xH100") -> Plan:
    job = Job(batch=16, sequence=64, precision="bfloat16")
    constraints = parse_constraints(["dp=2"], 16)
    opened = open_cluster(cluster)
    return make_plan(open_model("tiny-llama"), opened, job, constraints, name="tiny-llama", cluster_source=cluster)


def write_run(folder: Path, plan: Plan, times: list[float]) -> Path:
    folder.mkdir()
    (folder / "plan.json").write_text(dump_text(plan), encoding="utf-8")
    fields = {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 1024, "memory_bytes": 0, "memory_share": 0.0}
    lines = [json.dumps({"step": step, "step_s": time_s, **fields}) for step, time_s in enumerate(times, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def test_a_folder_gives_its_plan_and_the_median_after_warming_up(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", plan_of(), [9.0, 0.3, 0.2, 0.4])
    (run,) = open_user_runs([str(folder)])
    assert (run.name, run.measured_s) == ("run", 0.3)
    assert run.plan.prediction is not None and run.predict_step() == run.plan.prediction.step_s


@pytest.mark.parametrize(("log", "step_s"), [(TITAN, 16 * 64 / 2 / 1024), (MEGATRON, 0.25)])
def test_logs_of_other_trainers_are_read(tmp_path: Path, log: str, step_s: float) -> None:
    (tmp_path / "plan.json").write_text(dump_text(plan_of()), encoding="utf-8")
    (tmp_path / "log.txt").write_text(log, encoding="utf-8")
    (run,) = open_user_runs([f"{tmp_path / 'plan.json'}={tmp_path / 'log.txt'}"])
    assert run.name == "log.txt" and run.measured_s == pytest.approx(step_s)


def test_our_own_lines_are_read_as_torchtitans() -> None:
    line = "step:   10  loss:   5.1  grad_norm:   1.0  memory:  0.10GiB(1.0%)  tps: 2,048  tflops: 1  mfu: n/a"
    assert read_step_times(line, plan_of(), "log") == [16 * 64 / 2 / 2048]


def test_a_plan_of_a_calibrated_cluster_is_fitted_from_the_data_sheet(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(ClusterCalibration(devices={"H100": DeviceFactors(compute=0.5, memory=0.5)}), path)
    calibrated, plain = plan_of(f"2xH100@{path}"), plan_of()
    (run,) = open_user_runs([str(write_run(tmp_path / "run", calibrated, [1.0, 1.0]))])
    assert calibrated.prediction is not None and plain.prediction is not None
    assert run.predict_step() == plain.prediction.step_s < calibrated.prediction.step_s


def test_a_table_gives_a_run_a_line(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "# my runs\nname,model,cluster,fix,batch,sequence,precision,step_s,tokens_per_s,tokens_per_s_per_device\n"
        "a,tiny-llama,2xH100,dp=2,16,64,,0.5,,\n"
        "b,tiny-llama,2xH100,pp=2 schedule=1f1b,16,64,float32,,2048,\n"
        ",tiny-llama,2xH100,,16,64,bfloat16,,,1024\n"
    )
    runs = open_user_runs([str(table)])
    assert [run.measured_s for run in runs] == [0.5, 0.5, 0.5]
    assert [run.name for run in runs] == ["a", "b", "runs.csv, line 5"]
    assert [run.plan.job.precision for run in runs] == ["bfloat16", "float32", "bfloat16"]
    assert [len(run.plan.stages) for run in runs[:2]] == [1, 2]


HEAD = "model,cluster,batch,sequence,step_s,precision\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model,cluster\n", ["a column for each", "no rows", "batch, sequence", "tokens_per_s_per_device"]),
        ("model,cluster,batch\na,b,1\n", ["a column for each", "model, cluster, batch"]),
        (HEAD + "tiny-llama,2xH100,16,64,fast,\n", ["step_s is a number above zero", "line 2", "'fast'"]),
        (HEAD + "tiny-llama,2xH100,0,64,1,\n", ["batch is a number above zero", "'0'"]),
        (HEAD + "tiny-llama,2xH100,16,64,,\n", ["The run has no speed", "line 2"]),
        (HEAD + "tiny-llama,2xH100,16,64,1,int8\n", ["This is not a precision", "int8", "bfloat16"]),
        (HEAD + "tiny-llama,2xH101,16,64,1,\n", ["H101", "H100"]),
    ],
)
def test_bad_tables_are_answered(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(PipefitError) as caught:
        open_user_runs([str(tmp_path / "runs.csv")])
    assert all(word in caught.value.full_text() for word in words), caught.value.full_text()


def test_texts_that_are_no_runs_are_answered(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(dump_text(plan_of()), encoding="utf-8")
    (tmp_path / "log.txt").write_text("nothing\n")
    cases = {
        "nothing": "not a measured run",
        str(tmp_path / "none.csv"): "table of runs cannot be read",
        f"{tmp_path / 'plan.json'}={tmp_path / 'none.txt'}": "log cannot be read",
        f"{tmp_path / 'plan.json'}={tmp_path / 'log.txt'}": "log has no step times",
        str(write_run(tmp_path / "empty", plan_of(), [])): "no finished step",
    }
    for text, words in cases.items():
        with pytest.raises(PipefitError, match=words):
            open_user_runs([text])
