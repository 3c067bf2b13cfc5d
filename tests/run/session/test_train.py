"""`pipefit train` as a user meets it: real processes, a falling loss, a resume under another plan, clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support import train_toys as toys
from typer.testing import CliRunner

from pipefit.cli import build_app
from pipefit.cli.train import without_options
from pipefit.cluster import local_cluster, parse_spec
from pipefit.cluster import save_cluster_file as save_cluster
from pipefit.codec import content_digest
from pipefit.errors import PipefitError, StalePlanError
from pipefit.plan.check.rules import save_plan
from pipefit.run.session.launch import launch_lines
from pipefit.run.session.process_use import resident_bytes
from pipefit.run.session.staleness import check_cluster


def invoke(*arguments: str) -> str:
    """The message of a command that must be refused."""
    result = CliRunner().invoke(build_app(), ["train", *arguments])
    assert isinstance(result.exception, PipefitError), result
    return result.exception.full_text()


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_train_save_and_one_process_goes_on(tmp_path, alone):
    from transformers import AutoModelForCausalLM

    text = toys.write_text(tmp_path)
    two, the_plan = toys.write_plan(tmp_path, stages=2, microbatches=4)
    one, _ = toys.write_plan(tmp_path, "one.json", microbatches=2)
    run = tmp_path / "run"
    options = (
        "--local",
        "2",
        "--lr",
        "1e-2",
        "--eval-every",
        "4",
        "--save-every",
        "4",
        "--async-save",
        "--trace",
        "2",
        "--tensorboard",
    )
    first = toys.start(toys.command(two, text, run, *options, steps=8))
    assert first.returncode == 0, first.stderr
    lines = [line for line in first.stdout.splitlines() if line.startswith("step:")]
    assert len(lines) == 10 and "tps:" in lines[0] and "mfu:" in lines[0] and first.stdout.count("peak FLOP/s") == 1
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert [record["step"] for record in records if "eval_loss" in record] == [4, 8]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]
    trace = json.loads((run / "trace.json").read_text())
    assert trace["step"] == 2 and [rank["rank"] for rank in trace["ranks"]] == [0, 1]
    assert [span[0] for span in trace["ranks"][1]["spans"]] == the_plan.order.lanes[1].split()
    assert all(0 < rank["core_share"] <= 1 for rank in trace["ranks"])
    used = [record["memory_bytes"] for record in records if "loss" in record]
    assert 0 < max(used) < resident_bytes(), "without Python and its libraries"
    model = AutoModelForCausalLM.from_pretrained(run / "weights")
    assert model.config.num_hidden_layers == 2

    again = tmp_path / "again"
    resume = ("--resume", str(run / "checkpoints" / "step-00000004"), "--lr", "1e-2")
    code, error = toys.train_here(one, text, again, *resume, steps=8)
    assert code == 0, error
    after = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    resumed = [record["loss"] for record in after if "loss" in record]
    np.testing.assert_allclose(resumed, losses[4:], rtol=1e-4)


def test_a_plan_for_two_devices_needs_two_processes(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    path, one = toys.write_plan(tmp_path, stages=2, microbatches=4)
    save_plan(replace(one, hashes=replace(one.hashes, cluster="of another machine")), path)
    message = invoke(str(path), "-o", str(tmp_path / "run"), "--steps", "2")
    assert "it needs 2 processes" in message and "add --local 2" in message
    message = invoke(str(path), "-o", str(tmp_path / "run"), "--steps", "2", "--local", "3")
    assert "another number of processes" in message and "seen: 3" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", "0"), ("--steps", "1 or more")),
        (("--steps", "2", "--lr", "-1"), ("--lr", "above 0")),
        (("--steps", "2", "--lr", "nan"), ("--lr", "seen: nan", "above 0")),
        (("--steps", "2", "--lr", "inf"), ("--lr", "seen: inf", "a number above 0")),
        (("--steps", "2", "--weight-decay", "inf"), ("--weight-decay", "seen: inf", "0 or more")),
        (("--steps", "2", "--optimizer-option", "eps=inf"), ("--optimizer-option eps", "seen: inf", "above 0")),
        (("--steps", "2", "--optimizer-option", "eps"), ("--optimizer-option", "NAME=VALUE", "seen: 'eps'")),
        (
            ("--steps", "2", "--optimizer-option", "beta3=0"),
            ("no such option", "seen: beta3", "beta1=0.9"),
        ),
        (("--steps", "2", "--max-norm", "nan"), ("--max-norm", "seen: nan", "0 (off) or more")),
        (("--steps", "2", "--held-out", "nan"), ("--held-out", "seen: nan", "a fraction from 0 up to 1")),
        (("--steps", "2", "--held-out", "inf"), ("--held-out", "seen: inf", "a fraction from 0 up to 1")),
        (("--steps", "2", "--held-out", "-1"), ("--held-out", "seen: -1", "a whole number of rows")),
        (("--steps", "2", "--timeout", "inf"), ("--heartbeat-timeout", "seen: inf", "above 0, in seconds")),
        (("--steps", "2", "--keep", "0"), ("--keep-checkpoints", "1 or more")),
        (("--steps", "2", "--device", "tpu"), ("--device", "auto, cpu or cuda")),
        (("--steps", "2", "--nonfinite", "ignore"), ("--nonfinite", "stop or skip")),
        (("--steps", "2", "--resume", "a", "--weights", "b"), ("--resume and --weights", "not from both")),
    ],
)
def test_impossible_options_are_refused_by_name(tmp_path, options, words):
    path, _ = toys.write_plan(tmp_path, microbatches=2)
    message = invoke(str(path), "-o", str(tmp_path / "run"), *options)
    assert all(word in message for word in words), message


def test_no_plan_and_a_plan_cut_short(tmp_path):
    assert "cannot be read" in invoke(str(tmp_path / "none.json"), "-o", str(tmp_path / "run"), "--steps", "2")
    path, _ = toys.write_plan(tmp_path, microbatches=2)
    path.write_text(path.read_text()[:200])
    assert "may have been cut short" in invoke(str(path), "-o", str(tmp_path / "run"), "--steps", "2")


def test_launch_lines_for_real_clusters(tmp_path, monkeypatch):
    path, one = toys.write_plan(tmp_path, stages=2, microbatches=4, replicas=(1, 1))
    arguments = ["train", str(path), "-o", "run", "--steps", "9", "--per-host", "2", "--local=4", "--lr", "1e-3"]
    kept = without_options(arguments, "--per-host", "--local")
    text = launch_lines(path, one, kept, 2)
    assert "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500" in text
    assert f"-m pipefit train {path} -o run --steps 9 --lr 1e-3" in text
    assert "#SBATCH --nodes=2" in text and "srun torchrun" in text
    with pytest.raises(PipefitError, match="--nproc-per-node") as error:
        launch_lines(path, one, kept, 3)
    assert "a divisor of 4" in error.value.full_text()


@pytest.mark.parametrize("option", ["--nproc-per-node", "--per-host", "--nproc-per-node=2"])
def test_both_names_of_ranks_per_host_stay_out_of_the_torchrun_line(tmp_path, monkeypatch, option):
    path, _ = toys.write_plan(tmp_path, stages=2, microbatches=4, replicas=(1, 1))
    arguments = [
        "train",
        str(path),
        "-o",
        "run",
        "--steps",
        "9",
        "--lr",
        "1e-3",
        "--print-launch",
        *([option] if "=" in option else [option, "2"]),
    ]
    monkeypatch.setattr("sys.argv", ["pipefit", *arguments])
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result
    assert "--nproc-per-node=2 " in result.stdout
    assert f"-m pipefit train {path} -o run --steps 9 --lr 1e-3\n" in result.stdout, result.stdout


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another run", ("The folder holds another run", "no checkpoint to continue from", "delete this one")),
        ("run with checkpoints", ("The folder holds another run", "seen: checkpoints", "continue it with --resume")),
        ("other run resumed", ("another run than the one to continue", "seen: --resume", "give another folder")),
        ("own files", ("not empty and holds no run", "seen: config.json, notes", "new or empty folder")),
        ("a file", ("The run's folder is a file", "give a folder")),
        ("no checkpoint", ("There is no checkpoint here",)),
        ("no text", ("corpus is empty", "name files or folders that hold text")),
        ("no weights", ("There are no weights here",)),
        ("stale", ("made for a different version of this model", "make the plan again")),
        ("another cluster", ("The plan is stale: the cluster changed", "hashes.cluster", "make the plan again")),
        ("no cluster file", ("cluster file was not found", "no away.json beside the plan", "--cluster FILE")),
        ("no such cluster", ("cluster file was not found", "where: --cluster", "seen: gone.json")),
        ("another seed", ("The checkpoint is of another run: the seed differs", "--weights")),
        ("other rows held out", ("rows held out (--held-out) differs", "8 in the checkpoint, 9 now")),
        ("last step", ("already at the last step", "give more steps")),
    ],
)
def test_mistakes_leave_files_as_they_were(tmp_path, alone, case, words):
    """One process, in this process: the message comes once, the code is 2, nothing is written."""
    text = toys.write_text(tmp_path)
    path, one = toys.write_plan(tmp_path, microbatches=2)
    run = tmp_path / "run"
    options: list[str] = []
    if case == "another run":
        run.mkdir()
        (run / "metrics.jsonl").write_text("old\n")
    elif case == "run with checkpoints":
        (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    elif case == "own files":
        run.mkdir()
        (run / "config.json").write_text('{"model_type": "llama"}')
        (run / "notes").write_text("mine")
    elif case == "a file":
        run.write_text("mine")
    elif case == "no checkpoint":
        options = ["--resume", str(tmp_path / "nothing")]
    elif case == "no text":
        text.write_text("")
    elif case == "no weights":
        options = ["--weights", str(tmp_path)]
    elif case == "stale":
        save_plan(replace(one, hashes=replace(one.hashes, model="0123")), path)
    elif case == "another cluster":
        save_plan(replace(one, cluster="1xH100", hashes=replace(one.hashes, cluster="0123")), path)
    elif case == "no cluster file":
        save_plan(replace(one, cluster="far/away.json"), path)
    elif case == "no such cluster":
        options = ["--cluster", "gone.json"]
    else:
        assert toys.train_here(path, text, tmp_path / "first")[0] == 0
        options = ["--resume", str(tmp_path / "first")]
        if case == "other run resumed":
            run.mkdir()
            (run / "metrics.jsonl").write_text("other\n")
        if case == "other rows held out":
            options += ["--held-out", "9"]
        if case == "another seed":
            save_plan(replace(one, job=replace(one.job, seed=9)), path)
    before = _files(tmp_path)
    code, err = toys.train_here(path, text, run, *options)
    assert code == 2
    assert all(word in err for word in words), err
    assert err.count("pipefit: ") == 1 and "Traceback" not in err
    assert _files(tmp_path) == before


@pytest.mark.parametrize("where", ["directory", "file", "weights"])
def test_a_model_that_changed_since_the_plan_is_refused(tmp_path, alone, where):
    """The plan holds the model's description: its directory is compared all the same, and that of the weights."""
    text = toys.write_text(tmp_path)
    path, one = toys.write_plan(tmp_path, microbatches=2)
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(dict(one.model.config)))
    name = {"directory": str(source), "file": str(source / "config.json"), "weights": "gone"}[where]
    save_plan(replace(one, model=replace(one.model, name=name)), path)
    if where != "weights":
        assert toys.train_here(path, text, tmp_path / "first") == (0, "")
    changed = dict(one.model.config) | {"rope_theta": 5e5, "bos_token_id": 7}
    (source / "config.json").write_text(json.dumps(changed))
    options = ("--weights", str(source)) if where == "weights" else ()
    code, err = toys.train_here(path, text, tmp_path / "run", *options)
    assert code == 2 and not (tmp_path / "run").exists()
    what = "weights are of another model" if where == "weights" else "The plan is stale: the model changed"
    assert what in err and "seen: rope_theta 500000.0\n" in err and "allowed: rope_theta 10000.0, as in the plan" in err
    assert str(source) in err and err.count("pipefit: ") == 1


def test_the_cluster_of_a_plan_is_looked_for_and_compared(tmp_path, monkeypatch):
    path, one = toys.write_plan(tmp_path, microbatches=2)
    cluster = parse_spec("2xA100-80")
    one = replace(one, cluster="far/away.json", hashes=replace(one.hashes, cluster=content_digest(cluster)))
    save_cluster(cluster, tmp_path / "away.json")
    assert check_cluster(one, path) == cluster, "beside the plan"
    save_cluster(cluster, tmp_path / "here" / "other.json")
    assert check_cluster(one, tmp_path / "elsewhere" / "plan.json", str(tmp_path / "here" / "other.json")) == cluster
    save_cluster(replace(cluster, name="renamed"), tmp_path / "away.json")
    with pytest.raises(StalePlanError, match="the cluster changed"):
        check_cluster(one, path)
    here = replace(one, cluster="local:2")
    assert check_cluster(here, path) == local_cluster(2), "its figures follow the clock: not compared"
    assert check_cluster(replace(one, cluster=""), path) is None
    assert check_cluster(replace(one, hashes=replace(one.hashes, cluster="")), path) is None


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
